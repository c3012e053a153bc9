# Builds the root of one process sandbox, steps into it and becomes its first process. Run as root by
#   unshare --mount --pid --ipc --uts --net --fork sh process_root.sh DIRECTORY UID WORKDIR READ_ONLY STATE_MIB MEMORY_CGROUP PROGRAM...
# Everything that is mounted here is private to the sandbox and goes with its last process.
set -eu
directory=$1 uid=$2 workdir=$3 read_only=$4 state_mib=$5 memory_cgroup=$6
shift 6

read -r pid _ </proc/self/stat # the old /proc still shows the outer number
printf '%s\n' "$pid" >"$directory/pid.new"
mv "$directory/pid.new" "$directory/pid"
exec <>"$directory/in" >"$directory/out.discard" 2>"$directory/log" # errors of this script are in `log`
hostname sandbox 2>/dev/null || :
ip link set lo up 2>/dev/null || :

mount --make-rprivate /
cd "$directory/root"
mount --bind . .
cd "$directory/root"
mkdir -p usr etc proc dev run/rollway sys/fs/cgroup/memory tmp root var/tmp ".$workdir" .old
mount --rbind /usr usr
mount -o remount,bind,ro,nosuid usr
for name in bin sbin lib lib32 lib64 libx32; do
    if [ -L "/$name" ]; then
        ln -s "usr/$name" "$name"
    elif [ -d "/$name" ]; then
        mkdir "$name" && mount --bind "/$name" "$name" && mount -o remount,bind,ro,nosuid "$name"
    fi
done
if [ -d /etc/alternatives ]; then
    mkdir etc/alternatives && mount --bind /etc/alternatives etc/alternatives && mount -o remount,bind,ro etc/alternatives
fi
cp /etc/ld.so.cache etc/ 2>/dev/null || :
printf 'root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n' >etc/passwd
printf 'root:x:0:\nnogroup:x:65534:\n' >etc/group
printf '127.0.0.1 localhost sandbox\n' >etc/hosts
mount -t proc -o nosuid,nodev,noexec proc proc
mount -t tmpfs -o nosuid,mode=755,size=64m tmpfs dev
for name in null zero full random urandom; do
    touch "dev/$name" && mount --bind "/dev/$name" "dev/$name"
done
ln -s /proc/self/fd dev/fd && ln -s fd/0 dev/stdin && ln -s fd/1 dev/stdout && ln -s fd/2 dev/stderr
mkdir -m 1777 dev/shm
mount -t tmpfs -o "nosuid,nodev,noexec,mode=700,uid=$uid,gid=$uid,size=${state_mib}m" tmpfs run/rollway
if [ -n "$memory_cgroup" ]; then
    mount --bind "$memory_cgroup" sys/fs/cgroup/memory && mount -o remount,bind,ro sys/fs/cgroup/memory
fi
chown "$uid:$uid" . etc root run sys var var/tmp tmp ".$workdir"
chmod 1777 tmp var/tmp
chmod 755 .
if [ "$read_only" = 1 ]; then
    for name in "$workdir" /tmp /root; do mount --bind ".$name" ".$name"; done
    mount -o remount,bind,ro .
fi
exec >&- 1<>"$directory/out"
pivot_root . .old
cd /
umount -l /.old
exec setpriv --reuid "$uid" --regid "$uid" --clear-groups \
    unshare --user --map-root-user setpriv --bounding-set=-all --inh-caps=-all --no-new-privs -- "$@" 2>/dev/null

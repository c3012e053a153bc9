# Builds the root of one process sandbox, steps into it and becomes its first process, the agent. Run as root by
#   unshare --mount --pid --ipc --uts --net --fork sh process_root.sh DIRECTORY UID WORKDIR READ_ONLY DISK_MIB OOM_COUNTER AGENT FD
# FD is the listening socket that the agent inherits. Everything that is mounted here is private to the sandbox and goes with its last
# process.
set -eu
directory=$1 uid=$2 workdir=$3 read_only=$4 disk_mib=$5 oom_counter=$6 agent=$7 fd=$8

read -r stat </proc/self/stat # the old /proc still shows the outer number
set -- $stat
printf '%s %s\n' "$1" "${22}" >"$directory/pid.new" # with the time of its birth: numbers are used again
mv "$directory/pid.new" "$directory/pid"
exec >"$directory/log" 2>&1 # what this script and the agent complain of
ulimit -c 0
ulimit -f $((disk_mib * 2048)) # blocks of 512 bytes
hostname sandbox 2>/dev/null || :
ip link set lo up 2>/dev/null || :

mount --make-rprivate /
cd "$directory/root"
mount --bind . .
cd "$directory/root"
mkdir -p .rollway usr etc proc dev run sys tmp root var/tmp ".$workdir" .old
touch .rollway/agent && mount --bind "$agent" .rollway/agent && mount -o remount,bind,ro,nosuid .rollway/agent
# On a device of its own, so that the agent's watch does not walk it; .old stands for the second layer that overlayfs wants.
mount -t overlay -o ro,nosuid,lowerdir=/usr:.old overlay usr 2>/dev/null ||
    { mount --rbind /usr usr && mount -o remount,bind,ro,nosuid usr; }
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
chown "$uid:$uid" . etc root run sys var var/tmp tmp ".$workdir"
chmod 1777 tmp var/tmp
chmod 755 .
if [ "$read_only" = 1 ]; then
    for name in "$workdir" /tmp /root; do mount --bind ".$name" ".$name"; done
    mount -o remount,bind,ro .
fi
exec 8<"$oom_counter" # only the outer root can name it
pivot_root . .old
cd /
umount -l /.old
exec setpriv --reuid "$uid" --regid "$uid" --clear-groups unshare --user --map-root-user \
    /.rollway/agent --listen "$fd" --oom 8

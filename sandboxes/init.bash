# The first process of every sandbox: it is started as BOOT (sandboxes/guest.py) and reads this text from its stdin, then, into
# `session`, the text of session.bash, which it lays where sessions begin. It reaps orphans and does the few things that must work whatever runs beside it: it forks
# nothing (a fork bomb leaves no room), ignores every signal (PID 1 cannot be killed from inside) and has no time-out on `read`
# (bash blocks SIGCHLD while a timed read waits, and zombies would pile up).
#
# Protocol, one line each: `VERB NONCE [ARGUMENTS]` on stdin, `NONCE ANSWER` on stdout.
#   ping               -> ok
#   oom                -> processes killed for memory so far
#   kill TAG AGE_S     -> kills the processes whose environment carries TAG, their children, and orphans younger than AGE_S seconds
#                         that shed their environment; ok when none is left
#   kill_all           -> kills everything but this process; ok when all are dead
LC_ALL=C
trap '' HUP INT QUIT TERM USR1 USR2 PIPE ALRM TSTP TTIN TTOU XCPU XFSZ VTALRM IO PWR

IFS= read -r -d '' session
readonly session session_file=/run/rollway/session

oom_kills() {
    local file key value
    answer=0
    for file in /sys/fs/cgroup/memory/memory.oom_control /sys/fs/cgroup/memory.events; do
        [[ -r $file ]] || continue
        while read -r key value; do
            [[ $key == oom_kill ]] && answer=$value
        done <"$file"
    done
}

# Sets state, parent and birth (clock ticks since boot) of process $1. The name in the second field may hold anything, ") " too.
read_stat() {
    local line fields
    read -r line 2>/dev/null <"/proc/$1/stat" || return 1
    read -r -a fields <<<"${line##*) }" || return 1
    state=${fields[0]} parent=${fields[1]} birth=${fields[19]}
}

# Sets victims to the live processes that belong to tag $1: see `kill` above; $2 is the oldest birth of a stray that counts.
find_victims() {
    local tag=$1 since=$2 path pid environ state parent birth
    local -A mine=()
    victims=()
    for path in /proc/[0-9]*; do
        pid=${path#/proc/}
        [[ $pid == 1 ]] && continue
        { read_stat "$pid"; } 2>/dev/null || continue
        [[ $state == [ZX] ]] && continue
        environ=
        { read -r -N 65536 environ <"/proc/$pid/environ"; } 2>/dev/null
        if [[ $environ == *"ROLLWAY_CALL=$tag"* || -n ${mine[$parent]-} ]] ||
            [[ $environ != *ROLLWAY_CALL=* && $parent == 1 && $birth -ge $since ]]; then
            mine[$pid]=1
            victims+=("$pid:$state")
        fi
    done
}

# Stop first, so that nothing forks while it is hunted; kill when every one is still. What outruns that is killed with all the rest.
kill_tag() {
    local tag=$1 age=$2 up round entry running
    read -r up _ </proc/uptime
    local since=$(((${up%%.*} - age - 1) * 100))
    for ((round = 0; round < 60; round++)); do
        find_victims "$tag" "$since"
        ((${#victims[@]})) || return 0
        running=0
        for entry in "${victims[@]}"; do
            [[ $entry == *:[Tt] ]] || running=1
            ((round % 10 < 9)) && kill -STOP "${entry%:*}" 2>/dev/null
        done
        if ((!running || round % 10 == 9)); then
            for entry in "${victims[@]}"; do kill -KILL "${entry%:*}" 2>/dev/null; done
        fi
    done
    kill -KILL -1
}

kill_all() {
    local round path state parent birth alive
    for ((round = 0; round < 1000; round++)); do
        kill -KILL -1
        alive=0
        for path in /proc/[0-9]*; do
            [[ $path == /proc/1 ]] && continue
            { read_stat "${path#/proc/}"; } 2>/dev/null || continue
            [[ $state == [ZX] ]] || alive=1
        done
        ((alive)) || return
    done
}

while IFS=' ' read -r verb nonce tag age; do
    answer=ok
    [[ -s $session_file ]] || printf '%s' "$session" 2>/dev/null >"$session_file"
    case $verb in
    ping) ;;
    oom) oom_kills ;;
    kill) kill_tag "$tag" "$age" ;;
    kill_all) kill_all ;;
    *) answer=unknown ;;
    esac 2>/dev/null
    printf '%s %s\n' "$nonce" "$answer"
done

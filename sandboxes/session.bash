# One call of a shell session, read at the top level of a fresh bash:
#   bash -c '. session.bash; eval "$__rollway_script"; { __rollway_save $? "$@"; } 2>/dev/null' bash STATE DIRECTORY EXPORTS PIECE...
# It restores what the last call left in STATE, and saves it again at the end. STATE is emptied first: a call that does not reach
# its end (exit, exec, set -e, a kill) ends the session as it would end a bash that lives on.
__rollway_state=$1 __rollway_directory=$2 __rollway_exports=$3
printf -v __rollway_script '%s' "${@:4}"
set --

# Sets __rollway_names to every variable that is the session's own, without a fork.
__rollway_list() {
    local __rollway_letter
    __rollway_names=()
    for __rollway_letter in {a..z} {A..Z} _; do
        eval "__rollway_names+=(\"\${!$__rollway_letter@}\")"
    done
}

__rollway_own() {
    case $1 in
    __rollway_* | BASH | BASHOPTS | BASHPID | BASH_* | COMP_* | DIRSTACK | EPOCH* | EUID | FUNCNAME | GROUPS | HISTCMD | LINENO | \
        OLDPWD | PIPESTATUS | PPID | PWD | RANDOM | ROLLWAY_CALL | SECONDS | SHELLOPTS | SHLVL | SRANDOM | UID | _) return 1 ;;
    esac
}

# Called with the exit code and the positional parameters. Every option a script may have set is recorded before it is taken back.
__rollway_save() {
    local __rollway_code=$1 __rollway_option __rollway_set= __rollway_names __rollway_name
    for __rollway_option in allexport errexit noclobber noglob nounset pipefail verbose xtrace; do
        [[ -o $__rollway_option ]] && __rollway_set+=" -o $__rollway_option"
    done
    set +aeCfuvx +o pipefail
    {
        shopt -p
        trap -p
        trap - EXIT DEBUG ERR RETURN
        umask -p
        alias -p
        declare -f
        declare -F
        __rollway_list
        for __rollway_name in "${__rollway_names[@]}"; do
            __rollway_own "$__rollway_name" && declare -p "$__rollway_name"
        done
        printf 'OLDPWD=%q\ncd -- %q 2>/dev/null || cd -- %q\n' "${OLDPWD-}" "$PWD" "$__rollway_directory"
        shift
        printf 'set --'
        printf ' %q' "$@"
        printf '\n__rollway_options=%q\n# whole\n' "${__rollway_set:+set$__rollway_set}"
    } >"$__rollway_state"
    exit "$__rollway_code"
}

__rollway_options=
mapfile -t __rollway_lines 2>/dev/null <"$__rollway_state"
if [[ ${__rollway_lines[*]: -1} == '# whole' ]]; then
    __rollway_list
    for __rollway_name in "${__rollway_names[@]}"; do
        __rollway_own "$__rollway_name" && unset -v "$__rollway_name"
    done 2>/dev/null
    . "$__rollway_state" &>/dev/null # it prints what it declares
else
    mkdir -p -- "${__rollway_state%/*}" 2>/dev/null
    cd -- "$__rollway_directory" || exit 126
fi
: >"$__rollway_state"
unset -v __rollway_lines __rollway_names __rollway_name
eval "$__rollway_exports"
eval "$__rollway_options"

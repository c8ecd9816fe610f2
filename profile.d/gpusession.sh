# shellcheck shell=bash disable=SC1091
# Shows a notice of this login session's GPUs at the next prompt: a lease that ends soon, is lost,
# or waits. Read by login shells (sh, bash, zsh). Programs do not need this. Starts no process;
# GPUSESSION_DISABLE=1 turns it off.

case $-:${GPUSESSION_DISABLE-} in
*i*:1 | *i*:1*) ;;
*i*:*)
    if [ -n "${BASH_VERSION-}${ZSH_VERSION-}" ]; then
        # Shows the notice once after each change; keeps $?.
        __gpusession_notice() {
            local status_before=$? file=/run/gpusession/notice/$UID text=''
            if [ -s "$file" ]; then
                IFS= read -r -d '' text 2>/dev/null <"$file" || :
                if [ "$text" != "${__gpusession_said-}" ]; then printf '%s' "$text"; fi
            fi
            __gpusession_said=$text
            return "$status_before"
        }
        if [ -n "${ZSH_VERSION-}" ]; then
            # In eval, since other shells cannot parse arrays.
            eval 'precmd_functions+=(__gpusession_notice)'
        elif [[ ${PROMPT_COMMAND[*]-} != *__gpusession_notice* ]]; then
            # First, since the present value may end in a semicolon.
            PROMPT_COMMAND="__gpusession_notice${PROMPT_COMMAND:+; $PROMPT_COMMAND}"
        fi
    else
        # Other shells have neither a prompt hook nor a variable for the uid: shows the notice once,
        # now.
        __gpusession_uid=none
        while read -r __gpusession_key __gpusession_uid __gpusession_line; do
            case $__gpusession_key in Uid:) break ;; esac
        done 2>/dev/null </proc/self/status
        if [ -s "/run/gpusession/notice/$__gpusession_uid" ]; then
            while IFS= read -r __gpusession_line; do
                printf '%s\n' "$__gpusession_line"
            done <"/run/gpusession/notice/$__gpusession_uid"
        fi
        unset __gpusession_key __gpusession_uid __gpusession_line
    fi
    ;;
esac

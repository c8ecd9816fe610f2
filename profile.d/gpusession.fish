# Shows a notice of this login session's GPUs at the next prompt: a lease that ends soon, is lost,
# or waits. Programs do not need this. Starts no process; GPUSESSION_DISABLE=1 turns it off.
if status is-interactive; and test "$GPUSESSION_DISABLE" != 1
    set -g __gpusession_file /nonexistent
    # fish has no variable for the uid.
    if test -r /proc/self/status
        while read -l key real others
            test "$key" = Uid:; and set -g __gpusession_file /run/gpusession/notice/$real
        end </proc/self/status
    end
    set -g __gpusession_said ''
    # Shows the notice once after each change.
    function __gpusession_notice --on-event fish_prompt
        set -l text ''
        if test -s $__gpusession_file
            read -z text <$__gpusession_file
            test "$text" != "$__gpusession_said"; and printf '%s' "$text"
        end
        set -g __gpusession_said "$text"
    end
end

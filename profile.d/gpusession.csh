# Shows a notice of this login session's GPUs at the next prompt: a lease that ends soon, is lost,
# or waits. Programs do not need this. Starts no process; setenv GPUSESSION_DISABLE 1 turns it off.
if ($?prompt && $?tcsh) then
    set __gpusession_folder = /run/gpusession/notice/$uid.lines
    if ($?GPUSESSION_DISABLE) then
        if ("$GPUSESSION_DISABLE" == "1") set __gpusession_folder = /nonexistent
    endif
    set __gpusession_said = ()
    alias precmd 'if (-d $__gpusession_folder || $#__gpusession_said) source /usr/share/gpusession/notice.csh'
endif

# Says at the next prompt what the user should know of the GPUs of this session: a lease that ends soon, is lost, or waits.
# Programs need nothing of this. Forks only to show a notice; setenv GPUSESSION_DISABLE 1 turns it off.
if ($?prompt && $?tcsh) then
    set __gpusession_file = /run/gpusession/notice/$uid
    if ($?GPUSESSION_DISABLE) then
        if ("$GPUSESSION_DISABLE" == "1") set __gpusession_file = /nonexistent
    endif
    set __gpusession_said = 0
    # Once each time that it has changed, as its time says.
    alias precmd 'if (-s $__gpusession_file) if (-M $__gpusession_file != $__gpusession_said) source /usr/share/gpusession/notice.csh'
endif

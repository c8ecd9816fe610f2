# Says at the next prompt what the user should know of the GPUs of this session: a lease that ends soon, is lost, or waits.
# Programs need nothing of this. Forks nothing; setenv GPUSESSION_DISABLE 1 turns it off.
if ($?prompt && $?tcsh) then
    set __gpusession_folder = /run/gpusession/notice/$uid.lines
    if ($?GPUSESSION_DISABLE) then
        if ("$GPUSESSION_DISABLE" == "1") set __gpusession_folder = /nonexistent
    endif
    set __gpusession_said = ()
    alias precmd 'if (-d $__gpusession_folder || $#__gpusession_said) source /usr/share/gpusession/notice.csh'
endif

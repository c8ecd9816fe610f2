# Shows the notice that gpusession.csh has found, once each time that it has changed. csh can read a file without a fork only as
# commands, and those of the daemon are not to be trusted with a shell: the names of a folder's files are the lines.
set __gpusession_now = ()
if (-d $__gpusession_folder) then
    set __gpusession_kept = ( $?noglob $?nonomatch )
    unset noglob
    set nonomatch
    set __gpusession_now = ( $__gpusession_folder/* )
    if ($__gpusession_kept[1]) set noglob
    if (! $__gpusession_kept[2]) unset nonomatch
endif
if ("$__gpusession_now" != "$__gpusession_said") then
    foreach __gpusession_line ( $__gpusession_now:q )
        if (-e $__gpusession_line:q) echo $__gpusession_line:t:q
    end
endif
set __gpusession_said = ( $__gpusession_now:q )

# Shows the notice that gpusession.csh has found, once after each change. Without a fork, csh can
# read a file only as commands, and the daemon's file must not run in a shell. So the names of a
# folder's files are the lines.
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

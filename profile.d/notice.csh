# Shows the notice that gpusession.csh has found; an alias cannot say this.
cat $__gpusession_file
@ __gpusession_said = ( -M $__gpusession_file )

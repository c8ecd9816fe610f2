"""A node of Slurm, with the package's scripts, leases GPUs for each job that requests them."""
import subprocess

from harness import HERE, Failed, Host, expect

ORDER = 84
GROUP = "hosts"
SLURM = """ClusterName=lab
SlurmctldHost=batch
SlurmUser=root
ProctrackType=proctrack/cgroup
TaskPlugin=task/none
Prolog=/etc/slurm/prolog
PrologFlags=Alloc
TaskProlog=/etc/slurm/task-prolog
Epilog=/etc/slurm/epilog
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=rgpu
NodeName=batch CPUs=8 Gres=rgpu:2 State=UNKNOWN
PartitionName=main Nodes=batch Default=YES State=UP OverSubscribe=FORCE:4
SlurmdParameters=config_overrides
"""
# slurmd rejects a mixed cgroup hierarchy unless its version is configured. A host of the lab has
# only version 2 mounted.
CGROUP = """test $(wc -l </proc/self/cgroup) = 1 && exit
mkdir -p /run/cgroup/freezer && mount -t cgroup -o freezer none /run/cgroup/freezer
printf 'CgroupPlugin=cgroup/v1\\nCgroupMountpoint=/run/cgroup\\n' >/etc/slurm/cgroup.conf
sed -i 's,^cgroups=.*,cgroups=/run/cgroup,' /etc/slurm/prolog
"""
# This machine's control groups of version 1 are not the lab's alone.
REMOVE = "systemctl stop slurmd; test ! -d /run/cgroup || find /run/cgroup/freezer/slurm_batch -depth -type d -exec rmdir {} \\;"
# The lab's hosts do not install files of /usr/share/doc.
SCRIPTS = "dpkg-deb -x /root/debs/gpusession_*.deb /root/package && cp /root/package/usr/share/doc/gpusession/docs/examples/slurm/* /etc/slurm/"
INSTALL = "export DEBIAN_FRONTEND=noninteractive; apt-get update -qq && apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge"
NONE = "test \"$(gpusession list --json | grep -c '\"id\"')\" = 0"


def run(site, check):
    node, server = Host("batch"), site.servers[0]
    site.boot("batch")
    site.install_client(node)
    node.push([site.programs / "multiDevice"], "/usr/local/bin")
    with check("a machine without a [[lease]], a node of Slurm"):
        node.ok(f"gpusession join gpu1 {server.ok('gpuserver token create --name batch 2>/dev/null')}")
        node.ok("systemctl enable --now gpusession")
        done = subprocess.run([HERE / "lab", "run", "--uplink", node.name, "sh", "-c", INSTALL], capture_output=True, text=True)
        if done.returncode:
            raise Failed(done.stdout + done.stderr)
        node.write("/etc/slurm/slurm.conf", SLURM)
        node.write("/etc/slurm/gres.conf", "Name=rgpu Count=2\n")
        # The first client's lease takes the rest.
        node.ok(f"{SCRIPTS} && sed -i s/^memory=1/memory=0.4/ /etc/slurm/prolog")
        node.ok(CGROUP)
        node.ok("systemctl restart munge slurmctld slurmd")
        node.until("sinfo -h -o %T | grep -q idle", 20)
    with check("a job has the number of GPUs that it requested, with the memory that the prolog sets"):
        expect(node.ok("su -l alice -c 'srun --gres=rgpu:2 multiDevice'", timeout=60), "2 device(s) right")
        expect(node.ok("su -l alice -c 'srun --gres=rgpu:2 printenv NCCL_P2P_LEVEL'", timeout=60), "SYS")
        expect(node.ok("su -l alice -c 'NCCL_P2P_LEVEL=PHB srun --gres=rgpu:2 printenv NCCL_P2P_LEVEL'", timeout=60), "PHB")
        seen = node.ok("su -l alice -c 'srun --gres=rgpu:1 sh -c \"multiDevice; memFree\"'", timeout=60)
        expect(seen, "1 device(s) right")
        expect(seen, "819")
    with check("a job that requests no GPU has none, nor has its user's shell"):
        expect(node.fails("su -l alice -c 'srun vectorAdd'"), "cudaErrorNoDevice")
        expect(node.fails("su -l alice -c vectorAdd"), "cudaErrorNoDevice")
        expect(node.fails("su -l alice -c 'srun -J \"1 gres:rgpu:2 TresPerNode=gres:rgpu:2\" vectorAdd'"), "cudaErrorNoDevice")
    with check("with bind=yes only the job has its GPU, also where another job or a shell of its user names the lease"):
        node.ok("sed -i s/^bind=no/bind=yes/ /etc/slurm/prolog")
        node.start("bound", "srun --gres=rgpu:1 sh -c 'multiDevice; env -u GPUSESSION_LEASE multiDevice; until [ -e /tmp/go ]; do sleep 0.2; done'", user="alice")
        # The job finds its lease by its control group, too.
        node.until("grep -c '1 device(s) right' /run/bound.out | grep -qx 2", 20)
        named = "GPUSESSION_LEASE=$(cat /run/gpusession-jobs/*) vectorAdd"
        assert node.ok("gpusession list --json | grep -o '\"control_group\": *\"[^\"]*\"'").count("/job_") == 1
        node.ok("su -l alice -c 'cat /run/gpusession-jobs/*' | grep .")
        expect(node.fails(f"su -l alice -c 'srun sh -c \"{named}\"'".replace("$(cat", "\\$(cat")), "cudaErrorNoDevice")
        expect(node.fails(f"su -l alice -c '{named}'"), "cudaErrorNoDevice")
        node.ok("touch /tmp/go && sed -i s/^bind=yes/bind=no/ /etc/slurm/prolog")
        node.until(NONE, 20)
    with check("each task of an array has its own GPU"):
        node.ok("su -l alice -c 'sbatch --wait --array=0-1 --gres=rgpu:1 -o /tmp/array-%a.out --wrap multiDevice'", timeout=60)
        expect(node.ok("cat /tmp/array-0.out"), "1 device(s) right")
        expect(node.ok("cat /tmp/array-1.out"), "1 device(s) right")
    with check("a job's GPUs are released when it ends"):
        node.until(NONE, 20)
    with check("jobs of several users run at a time; a job too many waits in Slurm's queue"):
        for name, user in (("one", "alice"), ("two", "bob"), ("three", "alice")):
            node.start(name, f"srun --job-name={name} --gres=rgpu:1 sh -c 'multiDevice; until [ -e /tmp/go-{name} ]; do sleep 0.2; done'", user=user)
            node.until(f"squeue -h -n {name} | grep .", 20)
        node.until("cat /run/one.out /run/two.out | grep -c '1 device(s) right' | grep -qx 2", 20)
        assert node.ok("squeue -h -n three -o %t") == "PD"
        node.ok("touch /tmp/go-one")
        expect(node.until("grep right /run/three.out", 20), "1 device(s) right")
    with check("the GPUs of a cancelled job and of a killed job are released, too"):
        # Kills the task, not the srun that waits for it.
        node.ok("scancel -n two; pkill -KILL -u alice -f '^[a-z/]*/sh -c multiDevice.*go-three'")
        node.until(NONE, 30)
        node.until("sinfo -h -o %T | grep -qx idle", 20)
    node.run(REMOVE)
    node.lab("down")

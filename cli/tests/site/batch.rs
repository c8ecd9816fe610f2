//! The scripts for batch systems, with a real daemon and server.
//!
//! Slurm and PBS themselves are stubs, which print what these commands print of a job.

use super::*;

/// `qstat -f` of a job with three GPUs on this host and one on another; it breaks long lines.
const QSTAT: &str = "Job Id: 12.head\n    Job_Name = exec_vnode\n    exec_host = HOST/0*4+other/0\n    exec_vnode = (HOST:ncpus=4:rg\n\tpu=2)+(HOST[1]:rgpu=1)+(other:ncpus=4:rgpu=1)\n    Variable_List = A=1,\n\tB=x\n    exec_vnode = (HOST:rgpu=9)\n";

struct Node {
    site: Site,
    _processes: [Running; 2],
}

impl Node {
    fn start(gpus: u32) -> Self {
        let mut site = Site::with_simulated_gpus();
        site.variables[0].1 = gpus.to_string();
        let server = site.start_server();
        site.configure("[client]\nname = \"node1\"\n[access]\nextra_leases = 4\n", &site.token());
        let daemon = site.start_daemon();
        site.described("the server", |d| d["servers"][0]["state"] == "online");
        for folder in ["bin", "scripts", "jobs"] {
            std::fs::create_dir(site.path(folder)).unwrap();
        }
        let program = Path::new(env!("CARGO_BIN_EXE_gpusession"));
        std::os::unix::fs::symlink(program, site.path("bin/gpusession")).unwrap();
        Self { site, _processes: [daemon, server] }
    }

    /// Writes a stub of a scheduler's command, which prints a text.
    fn stub(&self, name: &str, output: &str) {
        let host = nix::unistd::gethostname().unwrap().into_string().unwrap();
        let host = host.split('.').next().unwrap();
        std::fs::write(self.site.path("bin").join(format!("{name}.txt")), output.replace("HOST", host))
            .unwrap();
        self.executable(&format!("bin/{name}"), "#!/bin/sh\ncat \"$0.txt\"\n");
    }

    fn executable(&self, path: &str, text: &str) {
        use std::os::unix::fs::PermissionsExt as _;
        std::fs::write(self.site.path(path), text).unwrap();
        std::fs::set_permissions(self.site.path(path), std::fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Runs a script of the examples, with its folder of jobs below the site.
    fn script(
        &self,
        name: &str,
        change: (&str, &str),
        arguments: &[&str],
        variables: &[(&str, &str)],
    ) -> Output {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/examples").join(name);
        let jobs = self.site.path("jobs").display().to_string();
        let text = std::fs::read_to_string(file).unwrap().replace("/run/gpusession-jobs", &jobs);
        self.executable("scripts/script", &text.replace(change.0, change.1));
        let mut command = Command::new(self.site.path("scripts/script"));
        self.site.environment(&mut command);
        command.env("PATH", format!("{}:/usr/bin:/bin", self.site.path("bin").display()));
        command.args(arguments).envs(variables.iter().copied());
        let output = command.output().unwrap();
        assert!(output.status.success(), "{name}: {}", text_of(&output));
        output
    }

    fn leases(&self) -> Vec<serde_json::Value> {
        self.site.described("the leases", |_| true)["leases"].as_array().unwrap().clone()
    }
}

fn text_of(output: &Output) -> String {
    text(&output.stdout) + &text(&output.stderr)
}

/// A control group as PBS's hook makes it, where this machine lets a test make one.
struct Group(PathBuf);

impl Group {
    fn new() -> Option<(Self, String)> {
        let version1 = Path::new("/sys/fs/cgroup/freezer");
        let root = if version1.exists() { version1 } else { Path::new("/sys/fs/cgroup") };
        let parent = format!("pbs_jobs_test_{}", std::process::id());
        let folder = root.join(&parent);
        std::fs::create_dir_all(folder.join("12.head")).ok()?;
        Some((Self(folder), format!("/{parent}/12.head")))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(self.0.join("12.head"));
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn a_job_of_pbs_has_the_gpus_of_its_first_host_until_it_ends() {
    let node = Node::start(3);
    let me = nix::unistd::User::from_uid(nix::unistd::getuid()).unwrap().unwrap();
    let job = ["12.head", me.name.as_str(), "group"];
    node.stub("qstat", "Job Id: 12.head\n    exec_vnode = (HOST:ncpus=4)\n    Variable_List = A=1\n");
    node.script("pbs/prologue", ("", ""), &job, &[]);
    node.script("pbs/epilogue", ("", ""), &job, &[]);
    assert!(node.leases().is_empty(), "a job without GPUs");

    node.stub("qstat", QSTAT);
    let group = Group::new();
    node.script("pbs/prologue", ("memory=1", "memory=0.25"), &job, &[]);
    let leases = node.leases();
    assert_eq!((leases.len(), &leases[0]["gpus"], &leases[0]["why"]), (1, &3.into(), &"job 12.head".into()));
    assert_eq!(leases[0]["uid"], me.uid.as_raw());
    match &group {
        Some((_, path)) => assert_eq!(leases[0]["control_group"], path.as_str()),
        None => assert!(leases[0].get("control_group").is_none()),
    }
    assert_eq!(std::fs::read_to_string(node.site.path("jobs/12.head")).unwrap().trim(), leases[0]["id"]);
    node.script("pbs/epilogue", ("", ""), &job, &[]);
    assert!(node.leases().is_empty());
    assert!(!node.site.path("jobs/12.head").exists());
}

#[test]
fn a_prolog_of_slurm_can_bind_the_lease_to_the_job() {
    let node = Node::start(2);
    let me = nix::unistd::getuid().to_string();
    let variables = [("SLURM_JOB_ID", "7"), ("SLURM_JOB_UID", me.as_str()), ("SLURMD_NODENAME", "node1")];
    node.stub("squeue", "7 gres:rgpu:2\n");
    let version_1 = format!("/uid_{me}/job_7");
    // Folders that slurmd makes, of either version of control groups and either kind of Slurm.
    for (folder, path) in [
        (None, None),
        (Some("system.slice/slurmstepd.scope"), Some("/system.slice/slurmstepd.scope/job_7".to_owned())),
        (
            Some("system.slice/node1_slurmstepd.scope"),
            Some("/system.slice/node1_slurmstepd.scope/job_7".to_owned()),
        ),
        (Some("freezer/slurm"), Some(format!("/slurm{version_1}"))),
        (Some("freezer/slurm_node1"), Some(format!("/slurm_node1{version_1}"))),
    ] {
        let groups = node.site.path("groups");
        let bind = match folder {
            Some(folder) => {
                std::fs::create_dir_all(groups.join(folder)).unwrap();
                format!("bind=yes\ncgroups={}", groups.display())
            }
            None => "bind=no".into(),
        };
        node.script("slurm/prolog", ("bind=no", &bind), &[], &variables);
        let leases = node.leases();
        assert_eq!((leases.len(), &leases[0]["gpus"]), (1, &2.into()));
        let group = leases[0].get("control_group").and_then(|group| group.as_str());
        assert_eq!(group, path.as_deref());
        let task = node.script("slurm/task-prolog", ("", ""), &[], &variables);
        assert_eq!(
            text(&task.stdout).trim(),
            format!(
                "export GPUSESSION_LEASE={}\nexport NCCL_P2P_LEVEL=SYS\nexport NCCL_WORK_FIFO_BYTES=65536",
                leases[0]["id"].as_str().unwrap()
            )
        );
        node.script("slurm/epilog", ("", ""), &[], &variables);
        assert!(node.leases().is_empty());
    }
}

//! The four programs of a control plane, their flags, and the order in which they start and stop.

use std::fs;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use super::Options;
use super::access::{self, Access};
use super::certs::Certs;
use crate::children::{Process, tied};
use crate::ports::free_ports;

/// What all programs need to know.
#[derive(Debug)]
pub(super) struct Setting {
    binary: PathBuf,
    folder: PathBuf,
    options: Options,
    certs: Certs,
    tokens: Tokens,
    etcd_port: u16,
    api_port: u16,
}

/// One token for each user that exists from the start.
#[derive(Clone, Debug)]
struct Tokens {
    admin: String,
    controllers: String,
    scheduler: String,
}

/// The audit policy: who did what to which object, not the object.
const AUDIT_POLICY: &str = "apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: None
  nonResourceURLs: [/livez*, /readyz*, /healthz*, /version, /metrics]
- level: Metadata
";

/// Lets kubelets report the health of devices in the status of pods.
const HEALTH_GATE: &str = "ResourceHealthStatus=true,";

/// Gates of native gang scheduling in 1.36; off by default there.
const GANG_GATES: &str = "GenericWorkload=true,GangScheduling=true,TopologyAwareWorkloadScheduling=true,\
                          WorkloadAwarePreemption=true";

impl Setting {
    pub fn new(binary: &Path, folder: &Path, options: Options) -> anyhow::Result<Setting> {
        let tokens = Tokens {
            admin: access::random_token()?,
            controllers: access::random_token()?,
            scheduler: access::random_token()?,
        };
        let certs = Certs::new(folder)?;
        let ports = free_ports(2)?;
        let setting = Setting {
            binary: binary.to_path_buf(),
            folder: folder.to_path_buf(),
            options,
            certs,
            tokens,
            etcd_port: ports[0],
            api_port: ports[1],
        };
        setting.write_files()?;
        Ok(setting)
    }

    pub fn access(&self) -> Access {
        Access {
            url: format!("https://127.0.0.1:{}", self.api_port),
            ca_pem: self.certs.ca_pem.clone(),
            token: self.tokens.admin.clone(),
        }
    }

    pub fn audit_log(&self) -> PathBuf {
        self.folder.join("audit.jsonl")
    }

    fn write_files(&self) -> anyhow::Result<()> {
        let Tokens { admin, controllers, scheduler } = &self.tokens;
        let users = format!(
            "{admin},admin,admin,system:masters\n\
             {controllers},system:kube-controller-manager,controllers\n\
             {scheduler},system:kube-scheduler,scheduler\n"
        );
        access::write(&self.folder.join("tokens.csv"), &users)?;
        fs::write(self.folder.join("audit-policy.yaml"), AUDIT_POLICY)?;
        let Access { url, ca_pem, .. } = self.access();
        for (name, token) in [("controllers", controllers), ("scheduler", scheduler)] {
            let text = access::text(&url, Some(&ca_pem), token);
            access::write(&self.folder.join(format!("{name}.kubeconfig")), &text)?;
        }
        Ok(())
    }

    fn start(&self, program: &str, flags: Vec<String>) -> anyhow::Result<Process> {
        let mut command = tied(&self.binary);
        command.arg(program).args(flags).current_dir(&self.folder);
        // Nothing of the person who runs the tests.
        command.env_remove("KUBECONFIG");
        Process::start(program, command, &self.folder).with_context(|| format!("starting {program}"))
    }

    fn file(&self, name: &str) -> String {
        self.folder.join(name).display().to_string()
    }

    pub fn etcd(&self) -> anyhow::Result<Process> {
        let url = format!("http://127.0.0.1:{}", self.etcd_port);
        let flags = vec![
            format!("--data-dir={}", self.file("etcd")),
            format!("--listen-client-urls={url}"),
            format!("--advertise-client-urls={url}"),
            // One member has no peers: any free port will do.
            "--listen-peer-urls=http://127.0.0.1:0".into(),
            "--log-level=warn".into(),
            // The data is gone with the run; tests are not to wait for a disk.
            "--unsafe-no-fsync".into(),
            "--quota-backend-bytes=8589934592".into(),
        ];
        self.start("etcd", flags)
    }

    pub fn api_server(&self) -> anyhow::Result<Process> {
        let Certs { ca, server, server_key, accounts_key, accounts_public, .. } = &self.certs;
        let seconds = self.options.eviction.as_secs();
        let mut flags = vec![
            format!("--etcd-servers=http://127.0.0.1:{}", self.etcd_port),
            "--bind-address=127.0.0.1".into(),
            "--advertise-address=127.0.0.1".into(),
            format!("--secure-port={}", self.api_port),
            // Loopback may not be an endpoint of a service.
            "--endpoint-reconciler-type=none".into(),
            format!("--cert-dir={}", self.file("certs")),
            format!("--client-ca-file={}", ca.display()),
            format!("--tls-cert-file={}", server.display()),
            format!("--tls-private-key-file={}", server_key.display()),
            format!("--token-auth-file={}", self.file("tokens.csv")),
            "--authorization-mode=Node,RBAC".into(),
            "--enable-admission-plugins=NodeRestriction".into(),
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local".into(),
            format!("--service-account-key-file={}", accounts_public.display()),
            format!("--service-account-signing-key-file={}", accounts_key.display()),
            "--service-cluster-ip-range=10.96.0.0/12".into(),
            "--kubelet-preferred-address-types=InternalIP".into(),
            format!("--default-not-ready-toleration-seconds={seconds}"),
            format!("--default-unreachable-toleration-seconds={seconds}"),
        ];
        if self.options.audit {
            flags.push(format!("--audit-policy-file={}", self.file("audit-policy.yaml")));
            flags.push(format!("--audit-log-path={}", self.audit_log().display()));
        }
        let gangs = if self.options.native_gangs { GANG_GATES } else { "" };
        flags.push(format!("--feature-gates={HEALTH_GATE}{gangs}"));
        if self.options.native_gangs {
            flags.push("--runtime-config=scheduling.k8s.io/v1alpha2=true".into());
        }
        flags.extend(self.options.api_server_flags.iter().cloned());
        self.start("kube-apiserver", flags)
    }

    pub fn controllers(&self) -> anyhow::Result<Process> {
        let Certs { ca, accounts_key, .. } = &self.certs;
        let mut flags = vec![
            format!("--kubeconfig={}", self.file("controllers.kubeconfig")),
            "--use-service-account-credentials".into(),
            format!("--service-account-private-key-file={}", accounts_key.display()),
            format!("--root-ca-file={}", ca.display()),
            "--leader-elect=false".into(),
            "--secure-port=0".into(),
            // The default is a folder of the system, which it would make.
            format!("--flex-volume-plugin-dir={}", self.file("volume-plugins")),
            format!("--node-monitor-grace-period={}s", self.options.node_grace.as_secs()),
            format!("--node-monitor-period={}ms", self.options.node_period.as_millis()),
            "--kube-api-qps=500".into(),
            "--kube-api-burst=1000".into(),
        ];
        if self.options.native_gangs {
            flags.push(format!("--feature-gates={GANG_GATES}"));
        }
        flags.extend(self.options.controller_manager_flags.iter().cloned());
        self.start("kube-controller-manager", flags)
    }

    pub fn scheduler(&self) -> anyhow::Result<Process> {
        let mut flags = vec![
            format!("--kubeconfig={}", self.file("scheduler.kubeconfig")),
            "--leader-elect=false".into(),
            "--secure-port=0".into(),
            "--kube-api-qps=500".into(),
            "--kube-api-burst=1000".into(),
        ];
        if self.options.native_gangs {
            flags.push(format!("--feature-gates={GANG_GATES}"));
        }
        flags.extend(self.options.scheduler_flags.iter().cloned());
        self.start("kube-scheduler", flags)
    }
}

/// The running programs. Fields are dropped in the order in which they must end: without etcd the API server would
/// take a minute to give up its port.
#[derive(Debug)]
pub(super) struct Programs {
    controllers: Slot,
    scheduler: Slot,
    api_server: Slot,
    etcd: Slot,
    pub setting: Setting,
}

/// A program that can be started anew.
#[derive(Debug)]
pub(super) struct Slot(Mutex<Process>);

impl Slot {
    fn new(process: Process) -> Slot {
        Slot(Mutex::new(process))
    }

    pub fn get(&self) -> MutexGuard<'_, Process> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// etcd and the API server: what must be ready before the others can work.
#[derive(Debug)]
pub(super) struct Servers {
    api_server: Process,
    etcd: Process,
    setting: Setting,
}

impl Servers {
    /// Starts them, and waits until both listen.
    pub fn start(setting: Setting) -> anyhow::Result<Servers> {
        let etcd = setting.etcd()?;
        wait_for_port(&etcd, setting.etcd_port, Duration::from_secs(30))?;
        let api_server = setting.api_server()?;
        wait_for_port(&api_server, setting.api_port, Duration::from_secs(60))?;
        Ok(Servers { api_server, etcd, setting })
    }

    /// An error if one has ended.
    pub fn check(&self) -> anyhow::Result<()> {
        check(&self.etcd)?;
        check(&self.api_server)
    }

    /// Starts the rest. Before the API server is ready they have no rights yet and would fall into long back-offs.
    pub fn complete(self) -> anyhow::Result<Programs> {
        let controllers = self.setting.controllers()?;
        let scheduler = self.setting.scheduler()?;
        Ok(Programs {
            controllers: Slot::new(controllers),
            scheduler: Slot::new(scheduler),
            api_server: Slot::new(self.api_server),
            etcd: Slot::new(self.etcd),
            setting: self.setting,
        })
    }
}

impl Programs {
    pub fn api_server(&self) -> &Slot {
        &self.api_server
    }

    pub fn controllers(&self) -> &Slot {
        &self.controllers
    }

    pub fn scheduler(&self) -> &Slot {
        &self.scheduler
    }

    /// In the order in which they must end.
    pub fn all(&self) -> [&Slot; 4] {
        [&self.controllers, &self.scheduler, &self.api_server, &self.etcd]
    }

    /// Starts those again that have ended: the controllers give up when the API server is away for too long.
    pub fn restart_ended(&self) -> anyhow::Result<()> {
        let mut controllers = self.controllers.get();
        if controllers.ended().is_some() {
            *controllers = self.setting.controllers()?;
        }
        let mut scheduler = self.scheduler.get();
        if scheduler.ended().is_some() {
            *scheduler = self.setting.scheduler()?;
        }
        Ok(())
    }

    /// The first program that has ended, with the end of its log.
    pub fn check(&self) -> anyhow::Result<()> {
        self.all().into_iter().try_for_each(|slot| check(&slot.get()))
    }

    /// The ends of all logs.
    pub fn tails(&self, lines: usize) -> String {
        let tail = |slot: &Slot| {
            let process = slot.get();
            format!("--- {}\n{}\n", process.name(), process.tail(lines))
        };
        self.all().into_iter().map(tail).collect()
    }
}

/// An error if the program has ended.
pub(super) fn check(process: &Process) -> anyhow::Result<()> {
    if let Some(status) = process.ended() {
        bail!("{} ended ({status}); its log ends with:\n{}", process.name(), process.tail(25));
    }
    Ok(())
}

/// Waits until somebody listens, and the program runs.
pub(super) fn wait_for_port(process: &Process, port: u16, at_most: Duration) -> anyhow::Result<()> {
    let deadline = Instant::now() + at_most;
    loop {
        check(process)?;
        if TcpStream::connect(("127.0.0.1", port)).is_ok() {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!("{} does not listen; its log ends with:\n{}", process.name(), process.tail(25));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whether a start failed because somebody else took a port in between.
pub(super) fn lost_a_port(error: &anyhow::Error) -> bool {
    format!("{error:#}").contains("address already in use")
}

/// The command of a program in the binary, for people: `kubectl`.
pub(super) fn kubectl(binary: &Path) -> Command {
    let mut command = Command::new(binary);
    command.arg("kubectl");
    command
}

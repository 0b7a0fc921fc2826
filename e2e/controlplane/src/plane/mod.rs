//! A real control plane: etcd, API server, controller manager and scheduler, on loopback, for as long as a value lives.
//!
//! ```no_run
//! # async fn example() -> anyhow::Result<()> {
//! use deepinfer_controlplane::{ControlPlane, Options};
//! let plane = ControlPlane::start(Options::default()).await?;
//! let namespace = plane.namespace("story").await?;
//! println!("{}", plane.kubectl_ok(&["-n", &namespace, "get", "all"]).await?);
//! # Ok(()) }
//! ```

mod access;
mod audit;
mod certs;
mod given;
mod objects;
mod options;
mod programs;
mod shared;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::{Api, Client};

use crate::binaries::{self, Need};
use crate::children::Signal;
use crate::runs::Run;
use access::Access;
use programs::{Programs, Servers, Setting, Slot};

pub use audit::AuditEvent;
pub use options::Options;
pub use shared::{shared, skipped};

/// Starts that are tried when other programs take the chosen ports.
const ATTEMPTS: usize = 5;
/// How long a control plane may take to be ready on a busy machine.
const READY: Duration = Duration::from_secs(180);

/// A running control plane, or a way into one that was given. Dropping it ends it.
#[derive(Debug)]
pub struct ControlPlane {
    access: Access,
    binary: PathBuf,
    // Before the folder: programs end before their data goes.
    programs: Option<Programs>,
    run: Run,
    files: AtomicU32,
    started_in: Duration,
}

impl ControlPlane {
    /// Starts one and waits until it is ready for pods in namespace `default`.
    ///
    /// # Errors
    /// If a program is missing and cannot be built, or does not start; the error has the ends of the logs.
    pub async fn start(options: Options) -> anyhow::Result<ControlPlane> {
        let binary = tokio::task::spawn_blocking(|| binaries::ensure(Need::Kubernetes)).await??;
        for attempt in 1.. {
            match ControlPlane::try_start(&binary, options.clone()).await {
                Err(error) if attempt < ATTEMPTS && programs::lost_a_port(&error) => {
                    eprintln!("controlplane: another program took a port, trying again");
                }
                result => return result,
            }
        }
        unreachable!("the last attempt returns")
    }

    async fn try_start(binary: &Path, options: Options) -> anyhow::Result<ControlPlane> {
        let begin = Instant::now();
        let run = Run::new().context("making the folder of a control plane")?;
        let setting = Setting::new(binary, run.folder(), options)?;
        let access = setting.access();
        let servers = tokio::task::spawn_blocking(move || Servers::start(setting)).await??;
        let client = access.client();
        let deadline = begin + READY;
        poll(async || is_ready(&client).await, || servers.check(), deadline, "the API server is not ready")
            .await?;
        let programs = tokio::task::spawn_blocking(move || servers.complete()).await??;
        let mut plane = ControlPlane {
            access,
            binary: binary.to_path_buf(),
            programs: Some(programs),
            run,
            files: AtomicU32::new(0),
            started_in: Duration::ZERO,
        };
        plane.wait_ready(READY).await?;
        plane.started_in = begin.elapsed();
        Ok(plane)
    }

    /// Waits until the API server is ready and the controllers do their work.
    ///
    /// # Errors
    /// If it takes longer, or a program ends.
    pub async fn wait_ready(&self, at_most: Duration) -> anyhow::Result<()> {
        let deadline = Instant::now() + at_most;
        let client = self.client();
        self.poll("the API server is not ready", deadline, async || is_ready(&client).await).await?;
        let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), "default");
        let account = async || accounts.get("default").await.is_ok();
        self.poll("there is no default service account", deadline, account).await
    }

    async fn poll(
        &self,
        wrong: &str,
        deadline: Instant,
        done: impl AsyncFnMut() -> bool,
    ) -> anyhow::Result<()> {
        let check = || self.programs.as_ref().map_or(Ok(()), Programs::check);
        poll(done, check, deadline, wrong).await.with_context(|| self.tails(15))
    }

    /// How long the start took, builds not counted.
    pub fn started_in(&self) -> Duration {
        self.started_in
    }

    /// A client of an administrator, made for the runtime of the caller: a client dies with its runtime.
    pub fn client(&self) -> Client {
        self.access.client()
    }

    /// Address of the API server.
    pub fn url(&self) -> &str {
        &self.access.url
    }

    /// The authority that signed the API server's certificate.
    pub fn ca_pem(&self) -> &str {
        &self.access.ca_pem
    }

    /// A token of an administrator.
    pub fn admin_token(&self) -> &str {
        &self.access.token
    }

    /// A folder for files that go with the control plane.
    pub fn folder(&self) -> &Path {
        self.run.folder()
    }

    /// A file with 64 random hex digits, the same one at each call.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn secret_file(&self, name: &str) -> anyhow::Result<PathBuf> {
        let path = self.folder().join(name);
        if path.is_file() {
            return Ok(path);
        }
        let text = access::random_token()? + &access::random_token()?;
        access::write(&path, &text)
    }

    /// A number that was not given before, for names of files and processes.
    pub(crate) fn number(&self) -> u32 {
        self.files.fetch_add(1, Ordering::Relaxed)
    }

    /// Leaves data and logs behind when it ends.
    pub fn keep_files(&self) {
        self.run.keep();
    }

    /// The administrator's kubeconfig.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn kubeconfig(&self) -> anyhow::Result<PathBuf> {
        let text = access::text(self.url(), Some(self.ca_pem()), self.admin_token());
        access::write(&self.folder().join("admin.kubeconfig"), &text)
    }

    /// A kubeconfig that goes through a proxy of the test (plain HTTP), as whoever the token says.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn kubeconfig_via(&self, proxy_url: &str, token: &str) -> anyhow::Result<PathBuf> {
        let path = self.folder().join(format!("via-{}.kubeconfig", self.number()));
        access::write(&path, &access::text(proxy_url, None, token))
    }

    /// A kubeconfig with the rights of a service account.
    ///
    /// # Errors
    /// If there is no such account.
    pub async fn kubeconfig_for(&self, namespace: &str, account: &str) -> anyhow::Result<PathBuf> {
        let token = self.token_for(namespace, account).await?;
        let path = self.folder().join(format!("{namespace}-{account}.kubeconfig"));
        access::write(&path, &access::text(self.url(), Some(self.ca_pem()), &token))
    }

    /// A token of a service account, good for a day.
    ///
    /// # Errors
    /// If there is no such account.
    pub async fn token_for(&self, namespace: &str, account: &str) -> anyhow::Result<String> {
        given::token(self.client(), namespace, account).await
    }

    /// Kills the API server: connections break, nothing answers on its port.
    ///
    /// # Errors
    /// If this control plane is not ours.
    pub fn kill_api_server(&self) -> anyhow::Result<()> {
        self.programs()?.api_server().get().kill();
        Ok(())
    }

    /// Starts the API server again (ending it first if it runs), on the same port with the same data, and waits until it is ready.
    ///
    /// # Errors
    /// If it does not start.
    pub async fn restart_api_server(&self) -> anyhow::Result<()> {
        let programs = self.programs()?;
        // Its port must be free.
        programs.api_server().get().kill();
        let process = programs.setting.api_server()?;
        *programs.api_server().get() = process;
        let deadline = Instant::now() + READY;
        loop {
            programs::check(&programs.api_server().get())?;
            // The controllers may have given up meanwhile.
            programs.restart_ended()?;
            match tokio::time::timeout(Duration::from_secs(10), self.wait_ready(READY)).await {
                Ok(result) => return result,
                Err(_) if Instant::now() < deadline => {}
                Err(_) => bail!("the API server does not come back\n{}", self.tails(25)),
            }
        }
    }

    /// Stops the API server's process without ending it: connections stay open and nothing answers.
    ///
    /// # Errors
    /// If this control plane is not ours.
    pub fn pause_api_server(&self) -> anyhow::Result<()> {
        self.signal(Programs::api_server, Signal::Stop)
    }

    /// Lets it run again.
    ///
    /// # Errors
    /// If this control plane is not ours.
    pub fn resume_api_server(&self) -> anyhow::Result<()> {
        self.signal(Programs::api_server, Signal::Cont)
    }

    /// Stops the controller manager's process, so that nothing but the test's operator acts.
    ///
    /// # Errors
    /// If this control plane is not ours.
    pub fn pause_controllers(&self) -> anyhow::Result<()> {
        self.signal(Programs::controllers, Signal::Stop)
    }

    /// Lets it run again.
    ///
    /// # Errors
    /// If this control plane is not ours.
    pub fn resume_controllers(&self) -> anyhow::Result<()> {
        self.signal(Programs::controllers, Signal::Cont)
    }

    /// Stops the scheduler's process: pods stay unbound.
    ///
    /// # Errors
    /// If this control plane is not ours.
    pub fn pause_scheduler(&self) -> anyhow::Result<()> {
        self.signal(Programs::scheduler, Signal::Stop)
    }

    /// Lets it run again.
    ///
    /// # Errors
    /// If this control plane is not ours.
    pub fn resume_scheduler(&self) -> anyhow::Result<()> {
        self.signal(Programs::scheduler, Signal::Cont)
    }

    fn signal(&self, which: fn(&Programs) -> &Slot, signal: Signal) -> anyhow::Result<()> {
        Ok(which(self.programs()?).get().signal(signal)?)
    }

    /// Resident memory of each program in bytes.
    pub fn memory(&self) -> BTreeMap<String, u64> {
        let all = self.programs.iter().flat_map(Programs::all);
        all.map(|slot| slot.get()).map(|process| (process.name().to_owned(), process.memory())).collect()
    }

    /// The ends of the programs' logs.
    pub fn tails(&self, lines: usize) -> String {
        self.programs.as_ref().map(|p| p.tails(lines)).unwrap_or_default()
    }

    /// Ends it: controllers, API server, etcd. Dropping does the same.
    pub fn stop(self) {
        drop(self);
    }

    fn programs(&self) -> anyhow::Result<&Programs> {
        self.programs.as_ref().context("the cluster was given, its programs are not ours to touch")
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        // A test that fails for a reason in the control plane should show it.
        if std::thread::panicking() {
            eprintln!("{}", self.tails(15));
        }
    }
}

/// Whether the API server says that it is ready, its first roles included.
async fn is_ready(client: &Client) -> bool {
    let request = http::Request::get("/readyz").body(Vec::new()).expect("a constant request");
    client.request_text(request).await.is_ok()
}

/// Asks until the answer is yes; an error when the check fails or the time is over.
async fn poll(
    mut done: impl AsyncFnMut() -> bool,
    check: impl Fn() -> anyhow::Result<()>,
    deadline: Instant,
    wrong: &str,
) -> anyhow::Result<()> {
    while !done().await {
        check()?;
        if Instant::now() > deadline {
            bail!("{wrong} in time");
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

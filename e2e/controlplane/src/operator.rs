//! The real operator as a process: started with its own account's rights, killed, stopped, read.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use bytes::Bytes;
use deepinfer_crds::names::rbac;
use http_body_util::{BodyExt as _, Empty};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;

use crate::ControlPlane;
use crate::binaries::workspace_binary;
use crate::children::{Process, Signal, tied};
use crate::ports::free_ports;

/// How long a started operator may take to say where it listens.
const LISTENING: Duration = Duration::from_secs(30);

/// How to run an operator.
#[derive(Clone, Debug)]
pub struct OperatorOptions {
    /// The namespace it lives in; its account must exist there ([`crate::install`]).
    pub namespace: String,
    /// More flags, as `--name=value`: they replace ours of the same name.
    pub flags: Vec<String>,
    /// Goes through this proxy (plain HTTP) to the API server.
    pub via: Option<String>,
    /// The address where pods reach it: that of the bridge when pods have networks of their own.
    pub fleet_host: IpAddr,
    /// Another binary than that of this workspace's build.
    pub binary: Option<PathBuf>,
}

impl Default for OperatorOptions {
    fn default() -> OperatorOptions {
        OperatorOptions {
            namespace: rbac::OPERATOR_NAMESPACE.to_owned(),
            flags: Vec::new(),
            via: None,
            fleet_host: IpAddr::from([127, 0, 0, 1]),
            binary: None,
        }
    }
}

impl OperatorOptions {
    /// The same options with one more flag.
    #[must_use]
    pub fn flag(mut self, flag: impl Into<String>) -> OperatorOptions {
        self.flags.push(flag.into());
        self
    }
}

/// Where a running operator listens, as `ip:port`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ports {
    /// `/metrics`.
    pub metrics: String,
    /// `/livez`, `/readyz`.
    pub health: String,
    /// The FleetView.
    pub fleet: String,
}

/// A running operator. Dropping it kills it.
#[derive(Debug)]
pub struct Operator {
    binary: PathBuf,
    arguments: Vec<String>,
    folder: PathBuf,
    name: String,
    process: Process,
    /// Where the log of the present process begins in the log file.
    log_start: usize,
}

impl Operator {
    /// Starts one operator; does not wait.
    ///
    /// # Errors
    /// If its account does not exist, or it cannot be started.
    pub async fn start(plane: &ControlPlane, options: OperatorOptions) -> anyhow::Result<Operator> {
        let mut one = Operator::start_replicas(plane, options, 1).await?;
        one.pop().context("one replica was asked for")
    }

    /// Starts several replicas, which elect a leader; pods know the addresses of all.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub async fn start_replicas(
        plane: &ControlPlane,
        options: OperatorOptions,
        count: usize,
    ) -> anyhow::Result<Vec<Operator>> {
        let binary = match options.binary.clone() {
            Some(binary) => binary,
            None => tokio::task::spawn_blocking(|| workspace_binary("deepinfer-operator")).await??,
        };
        let account = rbac::OPERATOR_SERVICE_ACCOUNT;
        let kubeconfig = match &options.via {
            None => plane.kubeconfig_for(&options.namespace, account).await?,
            Some(proxy) => {
                let token = plane.token_for(&options.namespace, account).await?;
                plane.kubeconfig_via(proxy, &token)?
            }
        };
        let master_key = plane.secret_file("master.key")?;
        let host = options.fleet_host;
        let ports = free_ports(count)?;
        let urls: Vec<String> = ports.iter().map(|port| format!("http://{host}:{port}")).collect();
        let mut replicas = Vec::with_capacity(count);
        for port in ports {
            let mut arguments = vec![
                "run".into(),
                format!("--kubeconfig={}", kubeconfig.display()),
                format!("--namespace={}", options.namespace),
                format!("--master-key-file={}", master_key.display()),
                "--metrics-listen=127.0.0.1:0".into(),
                "--health-listen=127.0.0.1:0".into(),
                // The same port after a restart: pods go on asking there.
                format!("--fleet-listen={host}:{port}"),
                format!("--fleet-url={}", urls.join(",")),
            ];
            let name = format!("operator-{}", plane.number());
            arguments.push(format!("--identity={name}"));
            replace(&mut arguments, &options.flags);
            replicas.push(Operator::launch(&binary, arguments, plane.folder(), name)?);
        }
        Ok(replicas)
    }

    fn launch(
        binary: &Path,
        arguments: Vec<String>,
        folder: &Path,
        name: String,
    ) -> anyhow::Result<Operator> {
        let process = start(binary, &arguments, folder, &name)?;
        let (binary, folder) = (binary.to_path_buf(), folder.to_path_buf());
        Ok(Operator { binary, arguments, folder, name, process, log_start: 0 })
    }

    /// Ends what runs (if it still does) and starts it again with the same flags and the same fleet port.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn restart(&mut self) -> anyhow::Result<()> {
        self.process.kill();
        self.log_start = self.process.log().len();
        self.process = start(&self.binary, &self.arguments, &self.folder, &self.name)?;
        Ok(())
    }

    /// The same, with other flags (`--name=value`) in place of those it had.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn restart_with(&mut self, flags: &[&str]) -> anyhow::Result<()> {
        let flags: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
        replace(&mut self.arguments, &flags);
        self.restart()
    }

    /// Kills it without a chance to do anything.
    pub fn kill9(&self) {
        self.process.kill();
    }

    /// Asks it to end (SIGTERM) and waits for that; kills it if it takes longer than `grace`.
    pub async fn terminate(&self, grace: Duration) -> anyhow::Result<ExitStatus> {
        self.process.signal(Signal::Term)?;
        let status = self.wait_exit(grace).await;
        if status.is_none() {
            self.process.kill();
        }
        status.with_context(|| format!("{} did not end within {} s", self.name, grace.as_secs()))
    }

    /// Stops the process without ending it (SIGSTOP): a replica that hangs.
    ///
    /// # Errors
    /// If it has ended.
    pub fn stop_signal(&self) -> anyhow::Result<()> {
        Ok(self.process.signal(Signal::Stop)?)
    }

    /// Lets it run again.
    ///
    /// # Errors
    /// If it has ended.
    pub fn cont(&self) -> anyhow::Result<()> {
        Ok(self.process.signal(Signal::Cont)?)
    }

    /// How it ended; `None` while it runs.
    pub fn exit_status(&self) -> Option<ExitStatus> {
        self.process.ended()
    }

    /// Waits until it has ended by itself.
    pub async fn wait_exit(&self, at_most: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + at_most;
        while self.exit_status().is_none() && Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        self.exit_status()
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Resident memory in bytes.
    pub fn memory(&self) -> u64 {
        self.process.memory()
    }

    /// What the present process wrote: one JSON object a line.
    pub fn logs(&self) -> String {
        self.process.log().split_off(self.log_start)
    }

    /// Its log lines of a level (`ERROR`, `WARN`, ...), as JSON.
    pub fn log_lines(&self, level: &str) -> Vec<serde_json::Value> {
        let logs = self.logs();
        let lines = logs.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
        lines.filter(|line| line["level"] == level).collect()
    }

    /// Where it listens, once it has said so.
    pub fn ports(&self) -> Option<Ports> {
        listening(&self.logs())
    }

    /// Waits until it says where it listens.
    ///
    /// # Errors
    /// If it ends or takes too long.
    pub async fn wait_listening(&self) -> anyhow::Result<Ports> {
        let deadline = Instant::now() + LISTENING;
        loop {
            if let Some(ports) = self.ports() {
                return Ok(ports);
            }
            self.check(deadline, "does not say where it listens")?;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until `/readyz` says yes.
    ///
    /// # Errors
    /// If it ends or takes longer; the error has its last answer and its log's end.
    pub async fn wait_ready(&self, at_most: Duration) -> anyhow::Result<()> {
        let ports = self.wait_listening().await?;
        let deadline = Instant::now() + at_most;
        loop {
            let answer = get(&ports.health, "/readyz").await;
            if matches!(answer, Ok((200, _))) {
                return Ok(());
            }
            self.check(deadline, &format!("is not ready: {answer:?}"))?;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Whether it says that it leads.
    pub async fn leads(&self) -> bool {
        let text = self.metrics_text().await.unwrap_or_default();
        text.lines().any(|line| line == "deepinfer_operator_leader 1")
    }

    /// Waits until it leads.
    ///
    /// # Errors
    /// If it ends or takes longer.
    pub async fn wait_leading(&self, at_most: Duration) -> anyhow::Result<()> {
        self.wait_listening().await?;
        let deadline = Instant::now() + at_most;
        while !self.leads().await {
            self.check(deadline, "does not lead")?;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }

    /// Its metrics.
    ///
    /// # Errors
    /// If it does not answer.
    pub async fn metrics_text(&self) -> anyhow::Result<String> {
        let ports = self.ports().context("the operator does not listen yet")?;
        let (status, text) = get(&ports.metrics, "/metrics").await?;
        if status != 200 {
            bail!("/metrics answers {status}");
        }
        Ok(text)
    }

    /// An error if it has ended or the time is over.
    fn check(&self, deadline: Instant, wrong: &str) -> anyhow::Result<()> {
        if let Some(status) = self.exit_status() {
            bail!("{} ended ({status}):\n{}", self.name, self.process.tail(20));
        }
        if Instant::now() > deadline {
            bail!("{} {wrong}; its log ends with:\n{}", self.name, self.process.tail(20));
        }
        Ok(())
    }
}

impl Drop for Operator {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- {}\n{}", self.name, self.process.tail(30));
        }
    }
}

fn start(binary: &Path, arguments: &[String], folder: &Path, name: &str) -> anyhow::Result<Process> {
    let mut command = tied(binary);
    command.args(arguments).current_dir(folder).env_remove("KUBECONFIG");
    Process::start(name, command, folder).with_context(|| format!("starting {}", binary.display()))
}

/// Adds flags, in place of earlier ones of the same name unless a flag may be repeated.
fn replace(arguments: &mut Vec<String>, flags: &[String]) {
    const REPEATED: [&str; 2] = ["--watch-namespace", "--default"];
    let name = |flag: &str| flag.split_once('=').map_or(flag, |(name, _)| name).to_owned();
    let new: Vec<String> = flags.iter().map(|flag| name(flag)).collect();
    arguments.retain(|old| !new.contains(&name(old)) || REPEATED.contains(&name(old).as_str()));
    arguments.extend(flags.iter().cloned());
}

/// The ports of the line in which the operator names them.
fn listening(logs: &str) -> Option<Ports> {
    logs.lines().filter(|line| line.contains("listening")).find_map(|line| {
        let line: serde_json::Value = serde_json::from_str(line).ok()?;
        // The fields of a log line stand beside its level or in an object of their own.
        let field = |name: &str| {
            let text = line[name].as_str().or_else(|| line["fields"][name].as_str());
            text.map(str::to_owned)
        };
        Some(Ports { metrics: field("metrics")?, health: field("health")?, fleet: field("fleet")? })
    })
}

/// One GET over plain HTTP.
async fn get(address: &str, path: &str) -> anyhow::Result<(u16, String)> {
    let client = Client::builder(TokioExecutor::new()).build_http::<Empty<Bytes>>();
    let uri = format!("http://{address}{path}").parse()?;
    let call = async {
        let answer = client.get(uri).await?;
        let status = answer.status().as_u16();
        let body = answer.into_body().collect().await?.to_bytes();
        anyhow::Ok((status, String::from_utf8_lossy(&body).into_owned()))
    };
    tokio::time::timeout(Duration::from_secs(5), call).await.context("no answer within 5 s")?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_replaces_the_earlier_one_of_its_name() {
        let mut arguments = vec!["run".to_owned(), "--a=1".to_owned(), "--default=x=1".to_owned()];
        replace(&mut arguments, &["--a=2".to_owned(), "--default=y=2".to_owned()]);
        assert_eq!(arguments, ["run", "--default=x=1", "--a=2", "--default=y=2"]);
    }

    #[test]
    fn the_ports_are_read_from_the_line_that_names_them() {
        let logs = "{\"level\":\"INFO\",\"message\":\"starting\"}\n\
            {\"level\":\"INFO\",\"message\":\"listening\",\"metrics\":\"127.0.0.1:1\",\"health\":\"127.0.0.1:2\",\
            \"fleet\":\"0.0.0.0:3\"}\n";
        let ports = listening(logs).unwrap();
        assert_eq!(ports.metrics, "127.0.0.1:1");
        assert_eq!(ports.fleet, "0.0.0.0:3");
        assert_eq!(listening("{\"message\":\"listening soon\"}\n"), None);
    }
}

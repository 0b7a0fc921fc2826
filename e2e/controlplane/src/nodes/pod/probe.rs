//! Probes: one attempt over HTTP, TCP or a command, and the streaks that make a verdict.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, ExecAction, HTTPGetAction, Probe, TCPSocketAction};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use super::super::process;
use super::context::Context;
use super::env::CommandLine;
use super::http::get;

/// Why a container has to be restarted.
#[derive(Debug)]
pub(crate) struct Unhealthy {
    pub message: String,
    /// A grace of its own, if the probe has one.
    pub grace: Option<Duration>,
}

/// What probes look at: one running container.
pub(crate) struct Prober<'a> {
    pub context: &'a Context,
    pub container: &'a Container,
    pub index: usize,
    pub line: &'a CommandLine,
}

impl Prober<'_> {
    /// Keeps `started` and `ready` true to the probes. Ends only when the container has to be restarted.
    pub(crate) async fn health(&self) -> Unhealthy {
        if let Some(probe) = &self.container.startup_probe
            && let Err(unhealthy) = self.startup(probe).await
        {
            return unhealthy;
        }
        let ready = self.container.readiness_probe.is_none();
        self.context.update(self.index, |view| {
            view.started = true;
            view.ready = ready;
        });
        tokio::select! {
            unhealthy = self.liveness() => unhealthy,
            never = self.readiness() => match never {},
        }
    }

    async fn startup(&self, probe: &Probe) -> Result<(), Unhealthy> {
        let mut streak = Streak::new(probe);
        sleep(initial_delay(probe)).await;
        loop {
            if let Some((good, message)) = self.verdict(probe, &mut streak).await {
                match good {
                    true => return Ok(()),
                    false => return Err(self.unhealthy(probe, "startup", message)),
                }
            }
            sleep(period(probe)).await;
        }
    }

    async fn liveness(&self) -> Unhealthy {
        let Some(probe) = &self.container.liveness_probe else { return std::future::pending().await };
        let mut streak = Streak::new(probe);
        sleep(initial_delay(probe)).await;
        loop {
            if let Some((false, message)) = self.verdict(probe, &mut streak).await {
                return self.unhealthy(probe, "liveness", message);
            }
            sleep(period(probe)).await;
        }
    }

    /// Keeps `ready` true to the readiness probe.
    pub(crate) async fn readiness(&self) -> std::convert::Infallible {
        let Some(probe) = &self.container.readiness_probe else { return std::future::pending().await };
        let mut streak = Streak::new(probe);
        sleep(initial_delay(probe)).await;
        let mut ready = self.context.board.borrow().get(self.index).is_some_and(|view| view.ready);
        loop {
            if let Some((good, message)) = self.verdict(probe, &mut streak).await
                && good != ready
            {
                ready = good;
                self.context.update(self.index, |view| view.ready = good);
                if !good {
                    self.context.warn("Unhealthy", &format!("Readiness probe failed: {message}"));
                }
            }
            sleep(period(probe)).await;
        }
    }

    fn unhealthy(&self, probe: &Probe, kind: &str, message: String) -> Unhealthy {
        let message = format!("Container {} failed {kind} probe: {message}", self.container.name);
        self.context.warn("Unhealthy", &message);
        let grace = probe.termination_grace_period_seconds.and_then(|s| u64::try_from(s).ok());
        Unhealthy { message, grace: grace.map(Duration::from_secs) }
    }

    /// One attempt, and the verdict if its streak is long enough.
    async fn verdict(&self, probe: &Probe, streak: &mut Streak) -> Option<(bool, String)> {
        if self.context.probes_hold() {
            return None;
        }
        let limit = seconds(probe.timeout_seconds, 1);
        let result = match timeout(limit, self.attempt(probe)).await {
            Ok(result) => result,
            Err(_) => Err(format!("no answer within {} s", limit.as_secs())),
        };
        let good = streak.add(result.is_ok())?;
        Some((good, result.err().unwrap_or_default()))
    }

    async fn attempt(&self, probe: &Probe) -> Result<(), String> {
        if let Some(action) = &probe.http_get {
            self.http(action).await
        } else if let Some(action) = &probe.tcp_socket {
            self.tcp(action).await
        } else if let Some(action) = &probe.exec {
            self.exec(action).await
        } else {
            Err("process nodes know httpGet, tcpSocket and exec probes only".to_owned())
        }
    }

    async fn tcp(&self, action: &TCPSocketAction) -> Result<(), String> {
        let port = port(self.container, &action.port)?;
        let host = action.host.as_deref().unwrap_or(&self.context.address);
        TcpStream::connect((host, port)).await.map(drop).map_err(|error| error.to_string())
    }

    /// Asks a path of the container; 200 to 399 is fine.
    pub(crate) async fn http(&self, action: &HTTPGetAction) -> Result<(), String> {
        let port = port(self.container, &action.port)?;
        let host = action.host.as_deref().unwrap_or(&self.context.address);
        let headers: Vec<_> =
            action.http_headers.iter().flatten().map(|h| (h.name.as_str(), h.value.as_str())).collect();
        let path = action.path.as_deref().unwrap_or("/");
        let tls = action.scheme.as_deref() == Some("HTTPS");
        let status = get((host, port), path, &headers, tls).await.map_err(|error| format!("{error:#}"))?;
        match status {
            200..400 => Ok(()),
            _ => Err(format!("HTTP probe failed with statuscode: {status}")),
        }
    }

    /// Runs a command beside the container, with its environment.
    pub(crate) async fn exec(&self, action: &ExecAction) -> Result<(), String> {
        let words = action.command.iter().flatten().cloned();
        let container = Container { command: Some(words.collect()), args: None, ..self.container.clone() };
        let line = super::env::command_line(
            &container,
            self.line.program.clone(),
            self.line.env.clone(),
            &self.line.mounts,
        );
        let line = line.map_err(|error| format!("{error:#}"))?;
        process::run(&line, &self.context.place()).await
    }
}

/// The number of a port that may be named.
fn port(container: &Container, port: &IntOrString) -> Result<u16, String> {
    let number = match port {
        IntOrString::Int(number) => Some(*number),
        IntOrString::String(name) => {
            let ports = container.ports.iter().flatten();
            let named = ports.clone().find(|p| p.name.as_ref() == Some(name)).map(|p| p.container_port);
            named.or_else(|| name.parse().ok())
        }
    };
    let number = number.and_then(|n| u16::try_from(n).ok());
    number.ok_or_else(|| format!("the container has no port {port:?}"))
}

fn seconds(value: Option<i32>, default: u64) -> Duration {
    Duration::from_secs(value.and_then(|v| u64::try_from(v).ok()).filter(|v| *v > 0).unwrap_or(default))
}

fn period(probe: &Probe) -> Duration {
    seconds(probe.period_seconds, 10)
}

fn initial_delay(probe: &Probe) -> Duration {
    probe
        .initial_delay_seconds
        .and_then(|s| u64::try_from(s).ok())
        .map_or(Duration::ZERO, Duration::from_secs)
}

/// Results of the same kind in a row.
#[derive(Debug)]
struct Streak {
    good: bool,
    length: i32,
    success: i32,
    failure: i32,
}

impl Streak {
    fn new(probe: &Probe) -> Self {
        let at_least_one = |value: Option<i32>, default| value.unwrap_or(default).max(1);
        Streak {
            good: false,
            length: 0,
            success: at_least_one(probe.success_threshold, 1),
            failure: at_least_one(probe.failure_threshold, 3),
        }
    }

    /// Adds a result; gives the verdict if there were enough of its kind in a row.
    fn add(&mut self, good: bool) -> Option<bool> {
        self.length = if self.good == good { self.length.saturating_add(1) } else { 1 };
        self.good = good;
        (self.length >= if good { self.success } else { self.failure }).then_some(good)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_needs_enough_results_in_a_row() {
        let probe: Probe = serde_json::from_value(serde_json::json!({"failureThreshold": 3})).unwrap();
        let mut streak = Streak::new(&probe);
        let verdicts: Vec<_> =
            [true, false, false, true, false, false, false, false].map(|good| streak.add(good)).to_vec();
        let none = None::<bool>;
        let (yes, no) = (Some(true), Some(false));
        assert_eq!(verdicts, [yes, none, none, yes, none, none, no, no]);
    }

    #[test]
    fn ports_are_found_by_name() {
        let container: Container = serde_json::from_value(serde_json::json!({
            "name": "c", "ports": [{"name": "control", "containerPort": 9810}]
        }))
        .unwrap();
        assert_eq!(port(&container, &IntOrString::String("control".into())), Ok(9810));
        assert_eq!(port(&container, &IntOrString::Int(80)), Ok(80));
        assert!(port(&container, &IntOrString::String("other".into())).is_err());
    }
}

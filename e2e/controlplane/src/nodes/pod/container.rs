//! One container: prepare, start, watch over, end, and again after a back-off.

use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, ContainerStateTerminated};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};

use super::super::faults::Fault;
use super::super::process::Running;
use super::context::Context;
use super::ending::{self, Backoff};
use super::env::{CommandLine, command_line, environment};
use super::expand::Mounts;
use super::probe::{Prober, Unhealthy};
use super::status::restart_policy;
use super::view::{Role, State};
use super::volumes::mounts;

/// What a container is told.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Order {
    Run,
    /// End, at the latest at this moment.
    EndBy(Instant),
}

/// The container was told to end while it was not running.
struct Told;

/// The words of one container.
pub(crate) struct Runner {
    pub context: Arc<Context>,
    pub container: Container,
    pub index: usize,
    pub role: Role,
    pub order: watch::Receiver<Order>,
}

impl Runner {
    /// Runs the container until it will not run again.
    pub(crate) async fn run(mut self) {
        let good = self.rounds().await.unwrap_or_else(|Told| self.ended_well());
        self.context.update(self.index, |view| {
            // It waited for its next start, which will not come.
            if matches!(view.state, State::Waiting { .. })
                && let Some(end) = view.last.take()
            {
                view.state = State::Terminated(Box::new(end));
            }
            (view.done, view.started, view.ready, view.pid) = (Some(good), false, false, None);
        });
    }

    async fn rounds(&mut self) -> Result<bool, Told> {
        let options = &self.context.shared.options;
        let mut backoff = Backoff::new(options.crash_backoff, options.crash_backoff_max);
        // After a node was off: what it was doing counts as an end.
        if self.began() && self.role != Role::Init && !self.starts_again() {
            return Ok(self.ended_well());
        }
        loop {
            let began = Instant::now();
            match self.round().await? {
                Some(Order::EndBy(_)) => return Ok(self.ended_well()),
                _ if !self.starts_again() => return Ok(self.ended_well()),
                _ => {}
            }
            let delay = backoff.after(began.elapsed());
            if !delay.is_zero() {
                let names = (&self.container.name, &self.context.name, &self.context.namespace);
                let message = format!(
                    "back-off {} restarting failed container={} pod={}_{}",
                    ending::spoken(delay),
                    names.0,
                    names.1,
                    names.2
                );
                self.wait_because("CrashLoopBackOff", Some(message));
                self.pause(delay).await?;
            }
        }
    }

    fn began(&self) -> bool {
        self.context.board.borrow()[self.index].began
    }

    fn exit_code(&self) -> Option<i32> {
        match &self.context.board.borrow()[self.index].state {
            State::Terminated(end) => Some(end.exit_code),
            _ => None,
        }
    }

    fn ended_well(&self) -> bool {
        self.exit_code() == Some(0)
    }

    /// Whether the container starts again after the way it ended.
    fn starts_again(&self) -> bool {
        let (pod, good) = (self.context.pod(), self.ended_well());
        match (self.role, restart_policy(&pod)) {
            (Role::Sidecar, _) => true,
            (Role::Init, policy) => !good && policy != "Never",
            (Role::Main, "Never") => false,
            (Role::Main, "OnFailure") => !good,
            (Role::Main, _) => true,
        }
    }

    /// One life. Gives the order that ended it, if one did.
    async fn round(&mut self) -> Result<Option<Order>, Told> {
        let program = self.image().await?;
        let (mounts, env) = loop {
            match self.configure().await {
                Ok(made) => break made,
                Err(error) => {
                    let message = format!("{error:#}");
                    self.wait_because("CreateContainerConfigError", Some(message));
                    self.pause(self.context.shared.options.retry_period).await?;
                }
            }
        };
        if let Order::EndBy(_) = *self.order.borrow() {
            return Err(Told);
        }
        let crash = self.fault(Fault::CrashLoop);
        let line = match crash {
            true => Ok(CommandLine { program: "/bin/false".into(), args: Vec::new(), env, mounts }),
            false => command_line(&self.container, program, env, &mounts),
        };
        let run = self.next_run();
        let log = self.context.log(&self.container.name, run);
        let started = line.and_then(|line| {
            let folder = self.working_folder(&line.mounts);
            let place = super::super::process::Place { folder: &folder, ..self.context.place() };
            Ok((Running::start(&line, &place, &log)?, line))
        });
        match started {
            Ok((running, line)) => Ok(self.live(running, &line, run).await),
            Err(error) => {
                let message = format!("{error:#}");
                self.context.warn("Failed", &message);
                self.record(ending::not_started(message), run);
                Ok(None)
            }
        }
    }

    /// The program of the image, once it can be had.
    async fn image(&mut self) -> Result<PathBuf, Told> {
        let delay = self.context.shared.faults.delay(&self.full_name(), &self.container);
        if !delay.is_zero() {
            self.wait_because("ContainerCreating", None);
            self.pause(delay).await?;
        }
        let options = &self.context.shared.options;
        let mut wait = options.pull_backoff;
        let longest = options.crash_backoff_max;
        loop {
            let image = self.container.image.clone().unwrap_or_default();
            let options = &self.context.shared.options;
            let found = options.program(&image, &self.container.name).map(std::path::Path::to_owned);
            let message = match found {
                Some(_) if self.fault(Fault::PullError) => {
                    format!("the test says that {image} cannot be pulled")
                }
                None => format!("no program is known for {image}: add it to NodeOptions::images"),
                Some(program) if !program.is_file() => format!("{} is not a file", program.display()),
                Some(program) => return Ok(program),
            };
            let message = format!("failed to pull image \"{image}\": {message}");
            self.wait_because("ErrImagePull", Some(message.clone()));
            self.context.warn("Failed", &message);
            self.pause(wait / 2).await?;
            let message = format!("Back-off pulling image \"{image}\": {message}");
            self.wait_because("ImagePullBackOff", Some(message));
            self.pause(wait / 2).await?;
            wait = (wait * 2).min(longest);
        }
    }

    /// Mounts and environment; an error says what is missing.
    async fn configure(&self) -> anyhow::Result<(Mounts, std::collections::BTreeMap<String, String>)> {
        let pod = self.context.pod();
        let around = self.context.surroundings(&pod);
        let mut base = self.context.shared.options.env.clone();
        if self.context.network.namespace.is_none() {
            base.push((crate::network::BIND_ADDRESS.to_owned(), self.context.address.clone()));
        }
        // A sub-path may use the environment, and the environment may name a mount: so twice.
        let plain = environment(&self.container, &around, &base, &Mounts::default()).await?;
        let lookup = |name: &str| plain.get(name).cloned();
        let message = self.context.folder.join(format!("{}.message", self.container.name));
        std::fs::write(&message, "")?;
        let mounts = mounts(&self.container, &self.context.folders(), lookup, &message)?;
        let env = environment(&self.container, &around, &base, &mounts).await?;
        Ok((mounts, env))
    }

    /// Watches over a running process until it ends.
    async fn live(&mut self, mut running: Running, line: &CommandLine, run: i32) -> Option<Order> {
        let since = Timestamp::now();
        let id = format!("process://{}-{}-{run}", self.context.uid, self.container.name);
        self.context.update(self.index, |view| {
            view.retire();
            (view.began, view.restarts, view.pid, view.id) =
                (true, run, Some(running.pid()), Some(id.clone()));
            (view.state, view.started, view.ready) = (State::Running { since }, false, false);
        });
        let context = self.context.clone();
        let container = self.container.clone();
        let prober = Prober { context: &context, container: &container, index: self.index, line };
        let why = tokio::select! {
            _ = running.wait() => Why::Ended,
            unhealthy = prober.health() => Why::Unhealthy(unhealthy),
            order = told(&mut self.order) => Why::Told(order),
        };
        let (order, note) = match why {
            Why::Ended => (None, None),
            Why::Unhealthy(Unhealthy { message, grace }) => {
                let grace = grace.unwrap_or_else(|| context.seen.borrow().grace());
                let until = Instant::now() + grace;
                self.end(&mut running, &prober, until).await;
                (None, Some(message))
            }
            Why::Told(order) => {
                let until = match order {
                    Order::EndBy(until) => until,
                    Order::Run => Instant::now(),
                };
                self.end(&mut running, &prober, until).await;
                (Some(order), None)
            }
        };
        let status = running.finish().await;
        let end = self.describe(status, since, id, note, run);
        self.record(end, run);
        order
    }

    /// Asks a process to end, and waits until it has or its time is over.
    async fn end(&mut self, running: &mut Running, prober: &Prober<'_>, until: Instant) {
        let hook = self.container.lifecycle.as_ref().and_then(|l| l.pre_stop.clone());
        let readiness = async {
            if prober.context.board.borrow()[prober.index].started {
                prober.readiness().await;
            }
            std::future::pending::<()>().await;
        };
        let calm = async {
            if let Some(hook) = hook {
                ending::hook(&hook, prober).await;
            }
            running.terminate();
            // An error means that there is nothing to wait for.
            running.wait().await.ok();
        };
        tokio::select! {
            () = calm => {}
            () = deadline(&mut self.order, until) => {}
            () = readiness => {}
        }
    }

    fn describe(
        &self,
        status: std::io::Result<ExitStatus>,
        since: Timestamp,
        id: String,
        note: Option<String>,
        run: i32,
    ) -> ContainerStateTerminated {
        let code = status.map_or(255, ending::exit_code);
        let words = self.context.folder.join(format!("{}.message", self.container.name));
        let log = self.context.log(&self.container.name, run);
        let said = ending::last_words(&self.container, code, &words, &log);
        ContainerStateTerminated {
            exit_code: code,
            reason: Some(if code == 0 { "Completed" } else { "Error" }.to_owned()),
            message: said.or(note),
            started_at: Some(Time(since)),
            finished_at: Some(Time(Timestamp::now())),
            container_id: Some(id),
            ..ContainerStateTerminated::default()
        }
    }

    fn record(&self, end: ContainerStateTerminated, run: i32) {
        self.context.update(self.index, |view| {
            (view.began, view.restarts) = (true, run);
            (view.started, view.ready, view.pid) = (false, false, None);
            view.state = State::Terminated(Box::new(end));
        });
    }

    fn wait_because(&self, reason: &str, message: Option<String>) {
        self.context.update(self.index, |view| {
            view.retire();
            view.state = State::Waiting { reason: reason.to_owned(), message };
        });
    }

    fn next_run(&self) -> i32 {
        let board = self.context.board.borrow();
        let view = &board[self.index];
        view.restarts + i32::from(view.began)
    }

    fn full_name(&self) -> String {
        format!("{}/{}", self.context.namespace, self.context.name)
    }

    fn fault(&self, fault: Fault) -> bool {
        self.context.shared.faults.has(&self.full_name(), &self.container, fault)
    }

    fn working_folder(&self, mounts: &Mounts) -> PathBuf {
        let wanted = self.container.working_dir.as_deref().map(|dir| PathBuf::from(mounts.apply(dir)));
        wanted.filter(|dir| dir.is_dir()).unwrap_or_else(|| self.context.folder.clone())
    }

    /// Sleeps, unless the container is told to end.
    async fn pause(&mut self, time: Duration) -> Result<(), Told> {
        tokio::select! {
            () = sleep(time) => Ok(()),
            _ = told(&mut self.order) => Err(Told),
        }
    }
}

/// Why a process is no longer watched.
enum Why {
    Ended,
    Unhealthy(Unhealthy),
    Told(Order),
}

/// Waits for the order to end. Without anybody to give orders, that is now.
async fn told(order: &mut watch::Receiver<Order>) -> Order {
    let told = order.wait_for(|order| *order != Order::Run).await;
    told.map_or_else(|_| Order::EndBy(Instant::now()), |order| *order)
}

/// Waits until the time of a container is over; an order may make it shorter.
async fn deadline(order: &mut watch::Receiver<Order>, mut until: Instant) {
    loop {
        if let Order::EndBy(at) = *order.borrow_and_update() {
            until = until.min(at);
        }
        tokio::select! {
            () = sleep_until(until) => return,
            changed = order.changed() => if changed.is_err() { return },
        }
    }
}

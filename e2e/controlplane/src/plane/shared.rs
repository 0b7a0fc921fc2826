//! One control plane for all tests of a process, and the reason why there may be none.

use std::sync::OnceLock;
use std::thread;

use super::{ControlPlane, Options};
use crate::args;
use crate::binaries::{self, Need};

/// The control plane of this test process: started by the first test that asks, ended with the process. `None` if it
/// cannot be had on this machine; the reason is printed, and in CI it is a failure.
///
/// With `KUBECONFIG_FOR_TESTS` it is the cluster of that file.
///
/// # Panics
/// If it cannot start, with the ends of the logs.
pub async fn shared() -> Option<&'static ControlPlane> {
    // Tests come from many runtimes, each of which ends with its test: the start has a thread of its own.
    static SHARED: OnceLock<Option<ControlPlane>> = OnceLock::new();
    let wait = || SHARED.get_or_init(|| thread::spawn(start).join().unwrap_or_else(|_| None)).as_ref();
    let plane = tokio::task::spawn_blocking(wait).await.expect("starting does not panic");
    if plane.is_none() {
        assert!(skipped(), "the control plane did not start: see above");
    }
    plane
}

/// Whether tests that need a control plane are to be skipped on this machine. Prints the reason. Never in CI.
pub fn skipped() -> bool {
    if args::in_ci() || args::given_kubeconfig().is_some() {
        return false;
    }
    match binaries::ensure(Need::Kubernetes) {
        Err(error @ binaries::Error::NoGo(_)) => {
            println!("skipped: {error}");
            true
        }
        _ => false,
    }
}

fn start() -> Option<ControlPlane> {
    if skipped() {
        return None;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let result = runtime.block_on(async {
        match args::given_kubeconfig() {
            Some(path) => ControlPlane::given(&path).await,
            None => ControlPlane::start(Options::default()).await,
        }
    });
    match result {
        Ok(plane) => {
            eprintln!("controlplane: ready in {:.1} s at {}", plane.started_in().as_secs_f32(), plane.url());
            Some(plane)
        }
        Err(error) => {
            eprintln!("controlplane: {error:#}");
            None
        }
    }
}

//! One process: its flags, its address, its log, and how it is hurt.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::http::PATIENCE;

/// The workspace.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().expect("the workspace")
}

/// The model that is shipped.
pub fn model() -> PathBuf {
    root().join("examples/models/tiny-v41")
}

/// A binary of this workspace, beside this test; built if it is not there.
pub fn binary(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("this test");
    let folder = test.parent().and_then(Path::parent).expect("target/profile/deps");
    let path = folder.join(name);
    if !path.exists() {
        let target = folder.parent().expect("target");
        let status = Command::new(env!("CARGO"))
            .args(["build", "-p", name, "--bin", name, "--target-dir"])
            .arg(target)
            .current_dir(root())
            .status();
        assert!(status.expect("cargo runs").success(), "{name} builds");
    }
    path
}

/// An address of this machine that no other pod has: every pod has the same ports.
pub fn address() -> IpAddr {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let process = std::process::id();
        let ip = Ipv4Addr::new(
            127,
            (100 + process % 100) as u8,
            (process / 100 % 200 + n / 200) as u8,
            (1 + n % 200) as u8,
        );
        let free = [8000, 9810, 9811, 29500].iter().all(|port| TcpListener::bind((ip, *port)).is_ok());
        if free {
            return ip.into();
        }
    }
}

/// A process; killed when dropped.
pub struct Pod {
    pub name: String,
    pub ip: IpAddr,
    program: PathBuf,
    flags: Vec<String>,
    child: Child,
    log: Arc<Mutex<String>>,
}

impl Pod {
    pub fn start(program: &str, name: &str, ip: IpAddr, flags: Vec<String>) -> Self {
        let (program, log) = (binary(program), Arc::new(Mutex::new(String::new())));
        let child = spawn(&program, ip, &flags, &log);
        Self { name: name.to_owned(), ip, program, flags, child, log }
    }

    /// The same again, under the same name, at the same address.
    pub fn restart(&mut self) {
        self.kill();
        self.child = spawn(&self.program, self.ip, &self.flags, &self.log);
    }

    pub fn port(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.ip, port)
    }

    pub fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    /// As with a node that loses its power.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    pub fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let status = Command::new("kill").args([&format!("-{name}"), &pid]).status().expect("kill runs");
        assert!(status.success());
    }

    /// Waits for the end of the process.
    #[track_caller]
    pub fn end(&mut self) -> ExitStatus {
        let name = self.name.clone();
        until(&format!("{name} ends"), || self.child.try_wait().expect("a child"))
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<&str> = log.lines().collect();
            eprintln!("--- {}\n{}", self.name, lines[lines.len().saturating_sub(25)..].join("\n"));
        }
    }
}

fn spawn(program: &Path, ip: IpAddr, flags: &[String], log: &Arc<Mutex<String>>) -> Child {
    let mut child = Command::new(program)
        .args(flags)
        .env("DEEPINFER_BIND_ADDRESS", ip.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    let (errors, kept) = (child.stderr.take().expect("piped"), Arc::clone(log));
    std::thread::spawn(move || {
        let mut reader = BufReader::new(errors);
        let mut line = String::new();
        while reader.read_line(&mut line).is_ok_and(|bytes| bytes > 0) {
            kept.lock().unwrap().push_str(&line);
            line.clear();
        }
    });
    child
}

/// Waits for something to hold.
#[track_caller]
pub fn until<T>(what: &str, mut holds: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(value) = holds() {
            return value;
        }
        assert!(begun.elapsed() < PATIENCE, "{what} within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// As Kubernetes does it: the new content appears at once and whole.
pub fn swap(path: &Path, text: &str) {
    let beside = path.with_file_name(".swap");
    fs::write(&beside, text).unwrap();
    fs::rename(&beside, path).unwrap();
}

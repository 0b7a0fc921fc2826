//! A running `deepinfer up` in a folder of its own.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::http::{self, PATIENCE, Response};

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace")
}

pub fn deepinfer() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_deepinfer"));
    command.current_dir(root()).stdin(Stdio::null());
    command
}

/// What a cluster file says.
#[derive(Clone, Debug)]
pub struct Spec {
    pub model: &'static str,
    pub prefill: u32,
    pub ranks: u32,
    pub args: Vec<&'static str>,
    pub thinking: &'static str,
}

impl Spec {
    /// The shipped model with one worker and one rank.
    pub fn shipped() -> Self {
        Self { model: "examples/models/tiny-v41", prefill: 1, ranks: 1, args: Vec::new(), thinking: "Off" }
    }

    /// The golden model, in the numerics of its vectors.
    pub fn golden(ranks: u32) -> Self {
        Self {
            model: "e2e/golden/tiny-bf16",
            prefill: 1,
            ranks,
            args: vec!["--numerics=f32"],
            thinking: "Off",
        }
    }

    pub fn yaml(&self) -> String {
        let path = root().join(self.model);
        format!(
            "apiVersion: deepinfer.io/v1alpha1\nkind: DeepInferCluster\nmetadata:\n  name: test\nspec:\n  \
             accelerator:\n    vendor: cpu\n  engine:\n    image: none\n    extraArgs: {}\n  model:\n    name: tiny\n    \
             source:\n      uri: file://{}\n  prefill:\n    replicas: {}\n  decode:\n    replicas: 1\n    supernode:\n      \
             nodes: {}\n  gateway:\n    replicas: 1\n    defaultThinking: \"{}\"\n",
            serde_json::to_string(&self.args).expect("JSON is YAML"),
            path.display(),
            self.prefill,
            self.ranks,
            self.thinking
        )
    }
}

/// A running cluster; killed when dropped.
pub struct Up {
    child: Child,
    pub folder: Arc<TempDir>,
    pub host: String,
    /// What it prints.
    pub greeting: String,
    log: Arc<Mutex<String>>,
}

impl Up {
    pub fn start(spec: &Spec) -> Self {
        Self::start_in(Arc::new(tempfile::tempdir().expect("a folder")), spec, &[])
    }

    /// Starts and waits until it serves.
    #[track_caller]
    pub fn start_in(folder: Arc<TempDir>, spec: &Spec, flags: &[&str]) -> Self {
        Self::start_with_log(folder, spec, flags, Stdio::piped())
    }

    /// Starts with its log going somewhere else than to [`Up::log`].
    #[track_caller]
    pub fn start_with_log(folder: Arc<TempDir>, spec: &Spec, flags: &[&str], errors: Stdio) -> Self {
        fs::write(folder.path().join("c.yaml"), spec.yaml()).expect("a file");
        let mut command = deepinfer();
        command
            .args(["up", "-f"])
            .arg(folder.path().join("c.yaml"))
            .args(["--listen", "127.0.0.1:0"])
            .args(flags);
        command.arg("--state-dir").arg(folder.path()).stdout(Stdio::piped()).stderr(errors);
        let mut child = command.spawn().expect("the binary runs");
        let log = Arc::new(Mutex::new(String::new()));
        if let Some(errors) = child.stderr.take() {
            let (mut errors, kept) = (BufReader::new(errors), Arc::clone(&log));
            std::thread::spawn(move || {
                let mut line = String::new();
                while errors.read_line(&mut line).is_ok_and(|bytes| bytes > 0) {
                    kept.lock().expect("no panic").push_str(&line);
                    line.clear();
                }
            });
        }
        let lines = lines_of(child.stdout.take().expect("piped"));
        let mut up = Self { child, folder, host: String::new(), greeting: String::new(), log };
        while !up.greeting.contains("curl ") {
            match lines.recv_timeout(PATIENCE) {
                Ok(line) => up.greeting.push_str(&line),
                Err(_) => panic!("it does not serve: {}{}", up.greeting, up.log()),
            }
        }
        let url = up.greeting.split("http://").nth(1).expect("a URL");
        up.host = url.split_whitespace().next().expect("a host").to_owned();
        up
    }

    pub fn log(&self) -> String {
        self.log.lock().expect("no panic").clone()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The state folder of the cluster.
    pub fn state(&self) -> PathBuf {
        self.folder.path().join("test")
    }

    /// Another command about this cluster.
    pub fn run(&self, args: &[&str]) -> Output {
        deepinfer().args(args).arg("--state-dir").arg(self.folder.path()).output().expect("the binary runs")
    }

    /// Applies a file and waits until the cluster serves as it says.
    #[track_caller]
    pub fn apply(&self, spec: &Spec) -> String {
        let path = self.folder.path().join("changed.yaml");
        fs::write(&path, spec.yaml()).expect("a file");
        let output = self.run(&["apply", "--wait", "--timeout", "120", "-f", path.to_str().expect("UTF-8")]);
        assert!(output.status.success(), "{}{}", String::from_utf8_lossy(&output.stderr), self.log());
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Asks the control socket.
    pub fn control(&self, question: &Value) -> Value {
        let mut stream = UnixStream::connect(self.state().join("control.sock")).expect("it listens");
        stream.write_all(format!("{question}\n").as_bytes()).expect("it reads");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("it answers");
        serde_json::from_str(&text).expect("JSON")
    }

    pub fn status(&self) -> Value {
        self.control(&json!("status"))["status"].clone()
    }

    /// Plans a fault for the next step of an agent of this role.
    pub fn fault(&self, role: &str, rank: usize, fault: &Value) {
        let status = self.status();
        let mut pods = status["pods"].as_array().expect("pods").iter();
        let pod = pods.rfind(|pod| pod["role"] == role).expect("a pod of this role");
        let host = pod["ports"][1].as_str().expect("a control port").to_owned();
        let sign = json!({"authorize": {"method": "POST", "path": "/v1/fault"}});
        let header = self.control(&sign)["authorized"].as_str().expect("a header").to_owned();
        let header = format!("authorization: {header}\r\n");
        let body = json!({"rank": rank, "fault": fault}).to_string();
        let response = http::ask(&host, "POST", "/v1/fault", &header, &body).expect("a response");
        assert_eq!(response.status, 202, "{}", response.body);
    }

    pub fn post(&self, path: &str, body: &Value) -> std::io::Result<Response> {
        http::ask(&self.host, "POST", path, "", &body.to_string())
    }

    pub fn get(&self, path: &str) -> Response {
        http::ask(&self.host, "GET", path, "", "").expect("a response")
    }

    /// Greedy tokens after a prompt of token ids, and how many of it were cached.
    #[track_caller]
    pub fn complete(&self, prompt: &[u32], tokens: usize) -> (Vec<u32>, u64) {
        complete(&self.host, prompt, tokens).unwrap_or_else(|error| panic!("{error}\n{}", self.log()))
    }

    pub fn signal(&self, name: &str) {
        let pid = self.pid().to_string();
        let status = Command::new("kill").args([&format!("-{name}"), &pid]).status().expect("kill runs");
        assert!(status.success());
    }

    /// Waits for the end of the process.
    #[track_caller]
    pub fn end(&mut self) -> ExitStatus {
        until("the process ends", || self.child.try_wait().expect("a child"))
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A greedy completion over HTTP.
pub fn complete(host: &str, prompt: &[u32], tokens: usize) -> Result<(Vec<u32>, u64), String> {
    let body = json!({
        "model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true,
        "return_token_ids": true,
    });
    let response =
        http::ask(host, "POST", "/v1/completions", "", &body.to_string()).map_err(|e| e.to_string())?;
    if response.status != 200 {
        return Err(format!("{}: {}", response.status, response.body));
    }
    let answer = response.json();
    let ids = answer["choices"][0]["token_ids"].as_array().ok_or("no ids")?.iter();
    let ids = ids.map(|id| u32::try_from(id.as_u64().expect("an id")).expect("an id")).collect();
    Ok((ids, answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0)))
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

/// Prompts of ids that are all ordinary tokens, different for each number.
pub fn prompt(number: u32, length: u32) -> Vec<u32> {
    (0..length).map(|i| 20 + (number * 131 + i * (7 + number % 5)) % 200).collect()
}

fn lines_of(reader: impl Read + Send + 'static) -> Receiver<String> {
    let (send, lines) = std::sync::mpsc::sync_channel(1024);
    std::thread::spawn(move || {
        let mut reader = BufReader::new(reader);
        let mut line = String::new();
        while reader.read_line(&mut line).is_ok_and(|bytes| bytes > 0) {
            if send.send(std::mem::take(&mut line)).is_err() {
                return;
            }
        }
    });
    lines
}

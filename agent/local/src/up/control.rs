//! The control socket: one question, one answer, a line of JSON each. Only the user who runs the cluster can open it.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use deepinfer_crds::{DeepInferCluster, DeepInferPool, Supernode};
use deepinfer_gateway::signals::GatewayStatus;
use deepinfer_protocol::agent_status::AgentStatus;
use deepinfer_protocol::load::ExpertLoadReport;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, mpsc, oneshot};

/// Longest question in bytes: a file of the largest size, escaped as JSON.
pub const MAX_QUESTION_BYTES: u64 = 8 << 20;
/// Longest answer in bytes: counts of every expert of a few dozen agents.
pub const MAX_ANSWER_BYTES: u64 = 64 << 20;
/// Time for a question to arrive.
const QUESTION_TIME: Duration = Duration::from_secs(10);
/// Questions at once; more wait.
const MAX_CALLERS: usize = 16;

/// What is asked.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Question {
    /// How things are.
    Status,
    /// The user applies a file.
    Apply {
        /// Its text.
        yaml: String,
        /// Its name, for messages.
        file: String,
        /// Folder that relative model paths start from.
        base: PathBuf,
        /// Only say what would change.
        dry_run: bool,
    },
    /// Which experts were chosen.
    Experts {
        /// Since the start; else the last closed window.
        total: bool,
    },
    /// The header that opens a control port for one path for a few minutes.
    Authorize {
        /// `GET` or `POST`.
        method: String,
        /// Without query.
        path: String,
    },
}

/// What is answered.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// To `Status`.
    Status(Box<ClusterView>),
    /// To `Apply`.
    Applied {
        /// What changes.
        text: String,
        /// Generation of the object now.
        generation: i64,
    },
    /// To `Experts`: one report for each agent.
    Experts(Vec<ExpertLoadReport>),
    /// To `Authorize`: value of the header `Authorization`.
    Authorized(String),
    /// It is not done, and why.
    Refused(String),
}

/// A running cluster as it is seen.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterView {
    /// The user's object with its status.
    pub cluster: DeepInferCluster,
    /// Its pools.
    pub pools: Vec<DeepInferPool>,
    /// Its supernodes.
    pub supernodes: Vec<Supernode>,
    /// What runs.
    pub pods: Vec<PodView>,
    /// What the gateway says of itself.
    pub gateway: Option<GatewayStatus>,
    /// Where clients connect.
    pub url: Option<String>,
    /// What this machine could not give as asked.
    pub scaled_down: Vec<String>,
    /// Why the state folder cannot be written.
    pub storage_problem: Option<String>,
    /// Where the state is.
    pub state_dir: PathBuf,
    /// The process.
    pub pid: u32,
    /// Wall clock in seconds since 1970, by which ages are told.
    pub now: i64,
}

/// A pod.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodView {
    /// Its name.
    pub name: String,
    /// `prefill`, `decode`, `gateway`.
    pub role: String,
    /// `Pending`, `Running`, `Ending`, `Failed`.
    pub phase: String,
    /// Takes work.
    pub ready: bool,
    /// Why it failed.
    pub message: String,
    /// Data and control port.
    pub ports: Option<(std::net::SocketAddr, std::net::SocketAddr)>,
    /// What its agent says.
    pub agent: Option<AgentStatus>,
}

/// A question with the way back.
pub type Asked = (Question, oneshot::Sender<Answer>);

/// Listens until dropped.
///
/// # Errors
/// If the socket cannot be made.
pub fn listen(path: &Path, questions: mpsc::Sender<Asked>) -> io::Result<()> {
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    let places = Arc::new(Semaphore::new(MAX_CALLERS));
    tokio::spawn(async move {
        while let Ok(place) = Arc::clone(&places).acquire_owned().await {
            match listener.accept().await {
                Ok((stream, _)) => {
                    let questions = questions.clone();
                    tokio::spawn(async move {
                        let _ = serve(stream, questions).await;
                        drop(place);
                    });
                }
                // For example too many open files: it passes.
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    });
    Ok(())
}

async fn serve(stream: UnixStream, questions: mpsc::Sender<Asked>) -> io::Result<()> {
    let (read, mut write) = stream.into_split();
    let mut line = String::new();
    let mut reader = BufReader::new(read).take(MAX_QUESTION_BYTES);
    let read = tokio::time::timeout(QUESTION_TIME, reader.read_line(&mut line)).await;
    read.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
    let answer = match serde_json::from_str::<Question>(&line) {
        Ok(question) => {
            let (reply, answered) = oneshot::channel();
            let gone = || Answer::Refused("the cluster is stopping".to_owned());
            match questions.send((question, reply)).await {
                Ok(()) => answered.await.unwrap_or_else(|_| gone()),
                Err(_) => gone(),
            }
        }
        Err(error) => Answer::Refused(format!("not a question of this release: {error}")),
    };
    let mut bytes = serde_json::to_vec(&answer).map_err(io::Error::other)?;
    bytes.push(b'\n');
    write.write_all(&bytes).await?;
    write.shutdown().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_question_gets_its_answer_and_nonsense_a_refusal() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("s");
        let (send, mut asked) = tokio::sync::mpsc::channel(1);
        listen(&path, send).expect("a socket");
        let mode = std::fs::metadata(&path).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        tokio::spawn(async move {
            while let Some((question, reply)) = asked.recv().await {
                let Question::Experts { total: true } = question else { panic!("{question:?}") };
                let _ = reply.send(Answer::Experts(Vec::new()));
            }
        });
        for (line, expected) in [("{\"experts\":{\"total\":true}}", "experts"), ("{\"steal\":1}", "refused")]
        {
            let mut stream = UnixStream::connect(&path).await.expect("it listens");
            stream.write_all(format!("{line}\n").as_bytes()).await.expect("it reads");
            let mut text = String::new();
            stream.read_to_string(&mut text).await.expect("it answers");
            assert!(text.starts_with(&format!("{{\"{expected}\"")), "{text}");
        }
    }
}

//! A small operator: asks the agents how they are, names leaders, serves the fleet view. It can be taken away, brought
//! back, and made to lie.

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use deepinfer_protocol::agent_status::{AgentPhase, AgentStatus, Role};
use deepinfer_protocol::fleet::{FleetMember, FleetView, Leader};
use deepinfer_protocol::{AgentId, Epoch, Generation};
use deepinfer_transport::{ClusterKey, control_auth};

use crate::http::Call;

pub const PATH: &str = "/v1/fleet/test/tiny";
/// Agents are asked this often.
const POLL: Duration = Duration::from_millis(100);
/// One that does not answer within this is not there.
const SILENT: Duration = Duration::from_millis(700);

/// See the module.
pub struct Operator {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    address: SocketAddr,
}

struct Shared {
    key: ClusterKey,
    view: Mutex<FleetView>,
    changed: Condvar,
    pods: Mutex<Vec<(AgentId, IpAddr)>>,
    /// Instead of every view: what is answered.
    lie: Mutex<Option<FleetView>>,
    streams: Mutex<Vec<TcpStream>>,
    gone: AtomicBool,
}

impl Operator {
    pub fn start(key: ClusterKey) -> Self {
        let shared = Arc::new(Shared {
            key,
            view: Mutex::new(FleetView {
                generation: Generation(1),
                cluster: "tiny".to_owned(),
                ..FleetView::default()
            }),
            changed: Condvar::new(),
            pods: Mutex::default(),
            lie: Mutex::default(),
            streams: Mutex::default(),
            gone: AtomicBool::new(true),
        });
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut operator = Self { shared, thread: None, address };
        operator.run(listener);
        operator
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    fn run(&mut self, listener: TcpListener) {
        self.shared.gone.store(false, Ordering::SeqCst);
        listener.set_nonblocking(true).unwrap();
        let shared = Arc::clone(&self.shared);
        self.thread = Some(std::thread::spawn(move || {
            let polling = Arc::clone(&shared);
            let poller = std::thread::spawn(move || {
                while !polling.gone.load(Ordering::SeqCst) {
                    polling.poll();
                    std::thread::sleep(POLL);
                }
            });
            while !shared.gone.load(Ordering::SeqCst) {
                let Ok((stream, _)) = listener.accept() else {
                    std::thread::sleep(Duration::from_millis(5));
                    continue;
                };
                stream.set_nonblocking(false).unwrap();
                shared.streams.lock().unwrap().push(stream.try_clone().unwrap());
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || shared.answer(stream));
            }
            poller.join().expect("no panic");
        }));
    }

    /// Killed: its port is closed, what hangs on it is cut.
    pub fn go_away(&mut self) {
        self.shared.gone.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("no panic");
        }
        for stream in self.shared.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Back at the same address, with what it knew.
    pub fn come_back(&mut self) {
        self.run(TcpListener::bind(self.address).expect("the address is still ours"));
    }

    /// Answers this from now on, or the truth.
    pub fn lie(&self, view: Option<FleetView>) {
        *self.shared.lie.lock().unwrap() = view;
        self.shared.changed.notify_all();
        // Whoever waits for news hears it now.
        for stream in self.shared.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    pub fn view(&self) -> FleetView {
        self.shared.view.lock().unwrap().clone()
    }

    /// A pod is there.
    pub fn add(&self, name: &str, ip: IpAddr) {
        self.shared.pods.lock().unwrap().push((name.into(), ip));
    }

    /// A pod is deleted.
    pub fn remove(&self, name: &str) {
        self.shared.pods.lock().unwrap().retain(|(pod, _)| pod.as_str() != name);
        self.shared.poll();
    }
}

impl Drop for Operator {
    fn drop(&mut self) {
        self.go_away();
    }
}

impl Shared {
    fn poll(&self) {
        let pods = self.pods.lock().unwrap().clone();
        let before = self.view.lock().unwrap().clone();
        let members: Vec<FleetMember> =
            pods.iter().filter_map(|(name, ip)| self.member(name, *ip, &before)).collect();
        let prefill = leader(&members, Role::Prefill, before.prefill_leader.as_ref());
        let decode = leader(&members, Role::Decode, before.decode_leader.as_ref());
        let mut view = self.view.lock().unwrap();
        let next = FleetView { members, prefill_leader: prefill, decode_leader: decode, ..view.clone() };
        if next != *view {
            *view = FleetView { generation: view.generation.next(), ..next };
            self.changed.notify_all();
        }
    }

    /// Who does not answer stays as it was, but does not serve.
    fn member(&self, name: &AgentId, ip: IpAddr, before: &FleetView) -> Option<FleetMember> {
        let control = SocketAddr::new(ip, 9810);
        let call = Call::new(control, "GET", "/v1/status").signed(&self.key).patience(SILENT);
        let answer = call.send().ok().filter(|answer| answer.status == 200);
        let Some(answer) = answer else {
            let known = before.member(name)?.clone();
            return Some(FleetMember { serving: false, ..known });
        };
        let status: AgentStatus = serde_json::from_str(&answer.body).expect("a status");
        Some(FleetMember {
            name: name.clone(),
            role: status.role,
            supernode: status.supernode,
            index: status.index,
            first_rank: status.index * status.ranks,
            ranks: status.ranks,
            data: SocketAddr::new(ip, 29500),
            control,
            serving: status.accepting && status.phase == AgentPhase::Serving,
            kv_epoch: status.kv_epoch,
        })
    }

    fn answer(&self, mut stream: TcpStream) {
        let mut head = String::new();
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        while !head.ends_with("\r\n\r\n") {
            if reader.read_line(&mut head).unwrap_or(0) == 0 {
                return;
            }
        }
        let target = head.split(' ').nth(1).unwrap_or_default();
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let header = head.lines().find_map(|line| line.strip_prefix("authorization: "));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let (status, body) = if control_auth::check(&self.key, now, "GET", path, header).is_err() {
            (401, String::new())
        } else if path != PATH {
            (404, String::new())
        } else {
            let number = |name: &str| -> u64 {
                let pair = query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
                pair.and_then(|value| value.parse().ok()).unwrap_or(0)
            };
            self.news(number("after"), Duration::from_secs(number("waitSeconds")))
        };
        let _ = write!(stream, "HTTP/1.1 {status} x\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    }

    fn news(&self, after: u64, wait: Duration) -> (u16, String) {
        let begun = Instant::now();
        let mut view = self.view.lock().unwrap();
        loop {
            if let Some(lie) = &*self.lie.lock().unwrap() {
                return (200, serde_json::to_string(lie).unwrap());
            }
            if view.generation.0 > after {
                return (200, serde_json::to_string(&*view).unwrap());
            }
            let left = wait.saturating_sub(begun.elapsed());
            if left.is_zero() || self.gone.load(Ordering::SeqCst) {
                return (204, String::new());
            }
            view = self.changed.wait_timeout(view, left.min(Duration::from_millis(200))).unwrap().0;
        }
    }
}

/// The present one while it is in the view, else the first that serves.
fn leader(members: &[FleetMember], role: Role, present: Option<&Leader>) -> Option<Leader> {
    let mut serving = members.iter().filter(|member| member.role == role && member.serving);
    if let Some(present) = present
        && (serving.clone().any(|member| member.name == present.agent) || serving.clone().next().is_none())
    {
        return Some(present.clone());
    }
    let epoch = present.map_or(Epoch(1), |present| present.epoch.next());
    serving.next().map(|member| Leader { agent: member.name.clone(), epoch })
}

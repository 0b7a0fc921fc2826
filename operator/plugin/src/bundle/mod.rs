//! `support-bundle`: everything that a bug report needs, in one archive.
//! Invariants: Secrets are never asked for; what cannot be read is named in the archive and does not end the command;
//! one log at a time is in memory.

mod objects;
mod redact;
mod tar;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use deepinfer_crds::yaml::to_yaml;
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::Api;
use kube::api::{ListParams, LogParams};
use serde_json::Value;

use crate::args::BundleArgs;
use crate::client::{Session, now};
use crate::output::{self, Outcome};
use crate::view::{self, View, name_of};
use crate::{status, why};

use self::tar::Tar;

/// Bytes of one log at most.
const LOG_BYTES: i64 = 8 << 20;
/// Pods whose logs are read, those with trouble first.
const PODS_MAX: usize = 200;
/// Name of the operator's Deployment, and so the beginning of the names of its pods.
const OPERATOR: &str = "deepinfer-operator";

/// Writes the archive.
///
/// # Errors
/// If the cluster cannot be read, or the file cannot be written.
pub async fn run(session: &Session, args: &BundleArgs) -> Result<Outcome> {
    let cluster = view::choose(session, args.cluster.as_deref()).await?;
    let name = name_of(&cluster.metadata).to_owned();
    let path = target(args, &name)?;
    let view = view::gather(session, cluster).await?;
    let mut bundle = Bundle {
        tar: Tar::new(open(&path)?, u64::try_from(view.now).unwrap_or(0)),
        folder: format!("deepinfer-{name}"),
        unread: String::new(),
        files: 0,
    };
    bundle.fill(session, args, &view).await.with_context(|| format!("-o {}", path.display()))?;
    let files = bundle.files;
    bundle.tar.finish().with_context(|| format!("-o {}", path.display()))?;
    if path == Path::new("-") {
        return Ok(Outcome::Good);
    }
    output::print(&format!(
        "{}: {files} files; look into it before you send it: tar -tf {0}\n",
        path.display()
    ))?;
    Ok(Outcome::Good)
}

fn target(args: &BundleArgs, cluster: &str) -> Result<PathBuf> {
    let path = args.output.clone().unwrap_or_else(|| format!("deepinfer-{cluster}-{}.tar", now()).into());
    let compressed = ["gz", "tgz", "zst", "xz", "zip"];
    if path.extension().is_some_and(|e| compressed.iter().any(|c| e == *c)) {
        bail!("-o {}: write FILE.tar and compress it, or pipe it: -o - | gzip > FILE.tar.gz", path.display());
    }
    Ok(path)
}

fn open(path: &Path) -> Result<Box<dyn Write>> {
    if path == Path::new("-") {
        return Ok(Box::new(io::stdout().lock()));
    }
    let file = OpenOptions::new().write(true).create_new(true).open(path);
    let file = file.with_context(|| format!("-o {}: an archive is never written over", path.display()))?;
    Ok(Box::new(io::BufWriter::new(file)))
}

struct Bundle {
    tar: Tar<Box<dyn Write>>,
    folder: String,
    /// What could not be read, a line each.
    unread: String,
    files: usize,
}

impl Bundle {
    async fn fill(&mut self, session: &Session, args: &BundleArgs, view: &View) -> Result<()> {
        self.file("README.txt", README)?;
        self.file("versions.txt", &versions(session).await)?;
        self.file("status.txt", &status::text(view, Some(view.now)))?;
        self.file("why.txt", &why::page(view))?;
        self.objects(session, view).await?;
        self.events(session).await?;
        self.nodes(session, view).await?;
        let api = session.api::<Pod>();
        self.logs(&api, troubled_first(&view.pods), "logs", args.lines).await?;
        let operators = Api::<Pod>::namespaced(session.client.clone(), &args.operator_namespace);
        match session.list(&operators, ListParams::default(), "the operator's pods").await {
            Ok(pods) => {
                let ours: Vec<&Pod> =
                    pods.iter().filter(|p| name_of(&p.metadata).starts_with(OPERATOR)).collect();
                if ours.is_empty() {
                    self.note(&format!("no pod {OPERATOR}-... is in namespace {}", args.operator_namespace));
                }
                self.logs(&operators, ours, "operator-logs", args.lines).await?;
            }
            Err(error) => self.note(&format!("{error:#}")),
        }
        let unread = std::mem::take(&mut self.unread);
        if !unread.is_empty() {
            self.file("not-read.txt", &unread)?;
        }
        Ok(())
    }

    fn file(&mut self, path: &str, contents: &str) -> Result<()> {
        self.files += 1;
        Ok(self.tar.file(&format!("{}/{path}", self.folder), contents.as_bytes())?)
    }

    fn note(&mut self, text: &str) {
        let _ = writeln!(self.unread, "{text}");
    }

    async fn objects(&mut self, session: &Session, view: &View) -> Result<()> {
        let mut cluster = serde_json::to_value(&view.cluster)?;
        redact::object(&mut cluster);
        self.file("cluster.yaml", &to_yaml(&cluster)?)?;
        for kind in objects::KINDS {
            match objects::read(session, kind, name_of(&view.cluster.metadata)).await {
                Ok(found) => {
                    for (name, object) in found {
                        self.file(&format!("{}/{name}.yaml", kind.folder()), &to_yaml(&object)?)?;
                    }
                }
                Err(error) => self.note(&format!("{}: {error:#}", kind.folder())),
            }
        }
        Ok(())
    }

    async fn events(&mut self, session: &Session) -> Result<()> {
        match session.list(&session.api::<Event>(), ListParams::default(), "events").await {
            Ok(events) => {
                let mut lines: Vec<(i64, String)> = events.iter().map(event).collect();
                lines.sort();
                self.file("events.txt", &lines.into_iter().map(|(_, line)| line + "\n").collect::<String>())
            }
            Err(error) => {
                self.note(&format!("{error:#}"));
                Ok(())
            }
        }
    }

    /// The nodes that pods of the cluster sit on, and those of its domains, without their annotations.
    async fn nodes(&mut self, session: &Session, view: &View) -> Result<()> {
        let api = session.cluster_wide::<k8s_openapi::api::core::v1::Node>();
        let nodes = match session.list(&api, ListParams::default(), "nodes").await {
            Ok(nodes) => nodes,
            Err(error) => {
                self.note(&format!("{error:#}"));
                return Ok(());
            }
        };
        let used: BTreeSet<&str> =
            view.pods.iter().filter_map(|p| p.spec.as_ref()?.node_name.as_deref()).collect();
        let mut text = String::new();
        for node in nodes {
            let mut value = serde_json::to_value(&node)?;
            redact::object(&mut value);
            if let Some(meta) = value.get_mut("metadata").and_then(Value::as_object_mut) {
                meta.remove("annotations");
            }
            if let Some(status) = value.get_mut("status").and_then(Value::as_object_mut) {
                status.remove("images");
            }
            let here =
                if used.contains(name_of(&node.metadata)) { " # runs pods of the cluster" } else { "" };
            let _ = write!(text, "---{here}\n{}", to_yaml(&value)?);
        }
        self.file("nodes.yaml", &text)
    }

    async fn logs(&mut self, api: &Api<Pod>, pods: Vec<&Pod>, folder: &str, lines: u32) -> Result<()> {
        if pods.len() > PODS_MAX {
            self.note(&format!(
                "{folder}: logs of {} of {} pods are left out",
                pods.len() - PODS_MAX,
                pods.len()
            ));
        }
        for pod in pods.into_iter().take(PODS_MAX) {
            let name = name_of(&pod.metadata);
            let status = pod.status.clone().unwrap_or_default();
            let containers =
                status.init_container_statuses.into_iter().chain(status.container_statuses).flatten();
            for container in containers {
                let started = container.state.as_ref().is_some_and(|s| s.waiting.is_none());
                let wanted = [(false, started), (true, container.restart_count > 0)];
                for (previous, _) in wanted.into_iter().filter(|(_, there)| *there) {
                    let suffix = if previous { "previous.log" } else { "log" };
                    let path = format!("{folder}/{name}.{}.{suffix}", container.name);
                    match log(api, name, &container.name, previous, lines).await {
                        Ok(text) => self.file(&path, &text)?,
                        Err(error) => self.note(&format!("{path}: {error}")),
                    }
                }
            }
        }
        Ok(())
    }
}

async fn log(api: &Api<Pod>, pod: &str, container: &str, previous: bool, lines: u32) -> kube::Result<String> {
    let params = LogParams {
        container: Some(container.to_owned()),
        previous,
        tail_lines: Some(i64::from(lines)),
        limit_bytes: Some(LOG_BYTES),
        timestamps: true,
        ..LogParams::default()
    };
    let text = api.logs(pod, &params).await?;
    Ok(text.lines().map(|line| redact::line(line) + "\n").collect())
}

fn troubled_first(pods: &[Pod]) -> Vec<&Pod> {
    let mut sorted: Vec<&Pod> = pods.iter().collect();
    sorted.sort_by_key(|pod| why::is_well(pod));
    sorted
}

async fn versions(session: &Session) -> String {
    let server = match session.client.apiserver_version().await {
        Ok(info) => format!("{} ({})", info.git_version, info.platform),
        Err(error) => format!("unknown: {error}"),
    };
    format!(
        "kubectl-deepinfer {}\nschema revision {}\nAPI server {server}\nnamespace {}\n",
        env!("CARGO_PKG_VERSION"),
        deepinfer_crds::names::SCHEMA_REVISION,
        session.namespace
    )
}

fn event(event: &Event) -> (i64, String) {
    let at = event.last_timestamp.as_ref().map(|t| t.0.as_second());
    let at = at.or_else(|| event.event_time.as_ref().map(|t| t.0.as_second()));
    let at = at.or_else(|| event.metadata.creation_timestamp.as_ref().map(|t| t.0.as_second())).unwrap_or(0);
    let when =
        k8s_openapi::jiff::Timestamp::from_second(at).map_or_else(|_| "-".to_owned(), |t| t.to_string());
    let object = &event.involved_object;
    let line = format!(
        "{when}  {}  {}/{}  {}: {}",
        event.type_.as_deref().unwrap_or("-"),
        object.kind.as_deref().unwrap_or("-"),
        object.name.as_deref().unwrap_or("-"),
        event.reason.as_deref().unwrap_or("-"),
        redact::line(event.message.as_deref().unwrap_or_default())
    );
    (at, line)
}

/// What the archive says about itself.
const README: &str = "\
status.txt, why.txt   what kubectl deepinfer says about the cluster
cluster.yaml          the DeepInferCluster
*/                    its children, a folder for each kind
events.txt            all events of the namespace, oldest first
nodes.yaml            nodes without annotations
logs/                 the end of each container's log; .previous.log is from before its restart
operator-logs/        the same of the operator
not-read.txt          what could not be read, if anything

Secrets were not read. Values of environment variables, credentials in flags, the engine's configuration and
credentials of HTTP in logs are replaced by REDACTED. Names, addresses, images and paths are as they were.
";

//! What a cluster file means on this machine: where its model lies, what the machine can give, and how the memory
//! is shared out.
//!
//! Invariant: shares are taken once for a process, so that a later plan makes the same pods.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use deepinfer_agent::sizing::{Given, Sizing};
use deepinfer_agent::{AgentArgs, host};
use deepinfer_crds::DeepInferCluster;
use deepinfer_crds::source::SourceUri;
use deepinfer_engine::sizes::Sizes;
use deepinfer_engine::{Checkpoint, Numerics};
use deepinfer_planner::{LocalTarget, ModelState, Target};

/// Part of the available memory that agents may take together; the rest is for weights in the page cache, the
/// gateway, and whatever else runs here.
const AGENTS_SHARE: u64 = 2;

/// The model behind a cluster file.
#[derive(Debug)]
pub struct LocalModel {
    /// Its folder.
    pub path: PathBuf,
    /// What the planner is told.
    pub state: ModelState,
    /// Bytes of KV and state, and the longest sequence; `None` if the model is not usable.
    pub sizes: Option<ModelSizes>,
}

/// What sizing needs to know of a model.
#[derive(Clone, Copy, Debug)]
pub struct ModelSizes {
    /// Longest sequence that it supports, in tokens.
    pub context: u32,
    /// Bytes of a block and of a sequence's state.
    pub bytes: [(u64, u64); 2],
    /// Whether `auto` numerics mean quantized.
    pub quantized: bool,
}

impl LocalModel {
    /// Looks at the model of a cluster; relative paths start from `base`. Reads headers and scales only.
    pub fn look(cluster: &DeepInferCluster, base: &Path) -> Self {
        let path = SourceUri::parse(&cluster.spec.model.source.uri).ok().and_then(|uri| uri.local_path(base));
        let Some(path) = path else {
            // The planner says why such a source is refused.
            return Self { path: PathBuf::new(), state: ModelState::Unknown, sizes: None };
        };
        let path = std::fs::canonicalize(&path).unwrap_or(path);
        match Checkpoint::open(&path) {
            Ok(checkpoint) => {
                let digest: String = checkpoint.digest().iter().take(8).map(|b| format!("{b:02x}")).collect();
                let sizes = Some(ModelSizes::of(&checkpoint));
                Self { path, state: ModelState::Ready { digest }, sizes }
            }
            Err(error) => {
                let message = format!("spec.model.source.uri: {error}");
                let reason = "SourceUnreachable".to_owned();
                Self { path, state: ModelState::Failed { reason, message }, sizes: None }
            }
        }
    }
}

impl ModelSizes {
    fn of(checkpoint: &Checkpoint) -> Self {
        let bytes = [Numerics::F32, Numerics::Quantized].map(|numerics| {
            let sizes = Sizes::of_checkpoint(checkpoint, numerics);
            (sizes.kv_bytes_per_block, sizes.state_bytes_per_slot)
        });
        let context = u32::try_from(checkpoint.shape.max_position_embeddings).unwrap_or(u32::MAX);
        Self { context, bytes, quantized: checkpoint.shape.quantized }
    }

    /// Sizes that an agent with these flags would choose.
    ///
    /// # Errors
    /// What does not fit, with the flag.
    pub fn sizing(&self, args: &AgentArgs) -> Result<Sizing, String> {
        use deepinfer_agent::args::NumericsChoice as Choice;
        let quantized = match args.numerics {
            Choice::Quantized => true,
            Choice::F32 => false,
            Choice::Auto => self.quantized,
        };
        let (block_bytes, state_bytes) = self.bytes[usize::from(quantized)];
        let available = host::available_memory();
        let given = Given { model_context: self.context, block_bytes, state_bytes, available };
        Sizing::of(args, &given).map_err(|error| error.to_string())
    }
}

/// What the planner is told about this machine.
pub fn local_target(model: &LocalModel, listen: SocketAddr, ranks: Option<u32>) -> Target {
    let target = LocalTarget::new(model.path.to_string_lossy(), listen.to_string());
    Target::Local(LocalTarget { ranks, ..target })
}

/// Memory for each agent, in bytes, when the machine has `available` and the limits of the target are used up; the
/// replacement of a supernode stands beside it for a while. `None` if the system does not tell.
pub fn memory_share(available: Option<u64>, cluster: &DeepInferCluster) -> Option<u64> {
    let limits = LocalTarget::new("", "");
    let workers = cluster.spec.prefill.replicas.unwrap_or(1).clamp(1, limits.max_prefill);
    let supernodes = cluster.spec.decode.replicas.unwrap_or(1).clamp(1, limits.max_supernodes);
    available.map(|bytes| bytes / AGENTS_SHARE / u64::from(workers + supernodes + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_leaves_room_for_a_replacement() {
        let mut cluster: DeepInferCluster = serde_json::from_value(serde_json::json!({
            "apiVersion": "deepinfer.io/v1alpha1", "kind": "DeepInferCluster", "metadata": {"name": "a"},
            "spec": {
                "accelerator": {"vendor": "cpu"}, "engine": {"image": "x"},
                "model": {"name": "m", "source": {"uri": "file:///nowhere/at/all"}},
                "prefill": {}, "decode": {"supernode": {"nodes": 1}},
            },
        }))
        .expect("a cluster");
        assert_eq!(memory_share(Some(6 << 30), &cluster), Some(1 << 30));
        cluster.spec.prefill.replicas = Some(900);
        assert_eq!(memory_share(Some(12 << 30), &cluster), Some(1 << 30), "the machine's limit counts");
        assert_eq!(memory_share(None, &cluster), None);
    }

    #[test]
    fn a_missing_model_is_named_with_its_field_and_path() {
        let file = super::super::file::ClusterFile {
            name: "c".into(),
            bytes: include_bytes!("../../../../examples/clusters/quickstart.yaml").to_vec(),
            base: "/nowhere/at/all".into(),
        };
        let model = LocalModel::look(&file.parse().expect("a good file").cluster, &file.base);
        let ModelState::Failed { message, .. } = model.state else { panic!("{:?}", model.state) };
        assert!(message.contains("spec.model.source.uri") && message.contains("/nowhere"), "{message}");
    }
}

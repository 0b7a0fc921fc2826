//! The last view in a file, so that a process that starts while the operator is away can serve.
//!
//! Invariant: the file is whole or absent: it is written beside itself and renamed. A file that cannot be read, is
//! damaged, or belongs to another cluster is named in the log and passed over; it never stops a start.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::Arc;

use deepinfer_protocol::fleet::FleetView;

use super::MAX_VIEW_BYTES;

/// See the module.
#[derive(Debug)]
pub(super) struct Ledger {
    path: PathBuf,
    cluster: String,
    /// The last problem that was logged.
    said: String,
}

impl Ledger {
    pub(super) fn new(path: PathBuf, cluster: String) -> Self {
        Self { path, cluster, said: String::new() }
    }

    /// What was kept. Blocks for one small file.
    pub(super) fn read(&self) -> Option<FleetView> {
        let path = self.path.display();
        let mut text = Vec::new();
        let read = File::open(&self.path)
            .and_then(|file| file.take(MAX_VIEW_BYTES as u64 + 1).read_to_end(&mut text));
        match read {
            Ok(_) if text.len() > MAX_VIEW_BYTES => {
                tracing::error!(ledger = %path, "longer than any fleet view: ignored");
                return None;
            }
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
            Err(error) => {
                tracing::error!(ledger = %path, %error, "cannot be read: ignored");
                return None;
            }
        }
        match serde_json::from_slice::<FleetView>(&text) {
            Ok(view) if view.cluster == self.cluster => {
                tracing::info!(ledger = %path, generation = view.generation.0, "starts with the view it kept");
                Some(view)
            }
            Ok(view) => {
                tracing::error!(ledger = %path, cluster = view.cluster, "of another cluster: ignored");
                None
            }
            Err(error) => {
                tracing::error!(ledger = %path, %error, "damaged: ignored");
                None
            }
        }
    }

    /// Keeps a view. Gives itself back, and whether that went well.
    pub(super) async fn write(mut self, view: Arc<FleetView>) -> (Option<Self>, bool) {
        let task = tokio::task::spawn_blocking(move || {
            let written = self.write_now(&view);
            match &written {
                Ok(()) => self.said.clear(),
                Err(error) if error.to_string() != self.said => {
                    self.said = error.to_string();
                    let ledger = self.path.display();
                    tracing::error!(%ledger, %error, "the view is not kept: a restart without the operator would not serve");
                }
                Err(_) => {}
            }
            (self, written.is_ok())
        });
        match task.await {
            Ok((ledger, written)) => (Some(ledger), written),
            // Only while the runtime shuts down.
            Err(_) => (None, false),
        }
    }

    fn write_now(&self, view: &FleetView) -> std::io::Result<()> {
        if let Some(folder) = self.path.parent() {
            fs::create_dir_all(folder)?;
        }
        let mut beside = self.path.clone().into_os_string();
        beside.push(".tmp");
        let mut file = File::create(&beside)?;
        file.write_all(&serde_json::to_vec(view)?)?;
        file.sync_all()?;
        fs::rename(&beside, &self.path)
    }
}

#[cfg(test)]
mod tests {
    use deepinfer_protocol::Generation;

    use super::*;

    fn view(generation: u64, cluster: &str) -> FleetView {
        FleetView { generation: Generation(generation), cluster: cluster.to_owned(), ..FleetView::default() }
    }

    #[tokio::test]
    async fn a_view_is_kept_and_a_damaged_or_foreign_file_is_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state/ledger.json");
        let ledger = Ledger::new(path.clone(), "c".to_owned());
        assert_eq!(ledger.read(), None);
        let (ledger, written) = ledger.write(Arc::new(view(7, "c"))).await;
        let ledger = ledger.unwrap();
        assert!(written);
        assert_eq!(ledger.read(), Some(view(7, "c")));
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "nothing is left beside it");
        assert_eq!(Ledger::new(path.clone(), "d".to_owned()).read(), None, "of another cluster");
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..whole.len() / 2]).unwrap();
        assert_eq!(ledger.read(), None, "cut in the middle");
        let (_, written) = ledger.write(Arc::new(view(8, "c"))).await;
        assert!(written);
    }

    #[tokio::test]
    async fn a_folder_that_cannot_be_written_is_reported_and_stops_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let ledger = Ledger::new(file.join("ledger.json"), "c".to_owned());
        let (ledger, written) = ledger.write(Arc::new(view(1, "c"))).await;
        assert!(ledger.is_some() && !written);
    }
}

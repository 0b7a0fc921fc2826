//! Our finalizers on an object; those of others stay.

use deepinfer_crds::names::{GROUP, manager};
use deepinfer_planner::Key;
use serde_json::json;

use super::{Done, Executor, On};
use crate::error::Error;
use crate::rest::{Call, Verb};

impl Executor {
    /// Sets our finalizers, over exactly the version that is known.
    pub(super) async fn write_finalizers(
        &self,
        on: &On<'_>,
        key: &Key,
        ours: &[String],
    ) -> Result<Done, Error> {
        let live = self.live(on, key).ok_or_else(|| Error::Gone { key: key.clone() })?;
        let before = live.meta().finalizers.clone().unwrap_or_default();
        let all = merged(&before, ours);
        if all == before {
            return Ok(Done::Nothing);
        }
        let resource = self.resource(on, key)?;
        let (uid, version) = (live.meta().uid.clone(), live.meta().resource_version.clone());
        let call = Call {
            verb: Verb::Patch,
            kind: Some(key.kind),
            what: key.to_string(),
            uri: format!(
                "{}/{}?fieldManager={}",
                resource.path(Some(on.namespace())),
                key.name,
                manager::MAIN
            ),
            content: "application/merge-patch+json",
            body: json!({"metadata": {"resourceVersion": version, "uid": uid, "finalizers": all}}),
        };
        match self.rest.call(call).await {
            Ok(value) => {
                let released = all.is_empty() && live.is_deleted();
                if released {
                    self.forget(on, key, uid.as_deref());
                } else {
                    self.remember(on, "patch", key, value)?;
                }
                Ok(Done::Wrote)
            }
            // What was to be released is gone.
            Err(error) if error.is_missing() => {
                self.forget(on, key, uid.as_deref());
                Ok(Done::Wrote)
            }
            Err(error) if matches!(error.status(), Some(409 | 422)) => {
                self.learn(on, &resource, key).await?;
                Err(Error::Gone { key: key.clone() })
            }
            Err(error) => Err(error),
        }
    }
}

/// `before` with `ours` in the place of all that are ours.
fn merged(before: &[String], ours: &[String]) -> Vec<String> {
    let is_ours = |name: &str| name.split_once('/').is_some_and(|(group, _)| group == GROUP);
    let mut all: Vec<String> =
        before.iter().filter(|name| !is_ours(name) || ours.contains(name)).cloned().collect();
    all.extend(ours.iter().filter(|name| !before.contains(name)).cloned());
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(list: &[&str]) -> Vec<String> {
        list.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn finalizers_of_others_stay_where_they_are() {
        let before = words(&["example.com/mine", "deepinfer.io/drain"]);
        assert_eq!(merged(&before, &[]), ["example.com/mine"]);
        assert_eq!(merged(&before, &words(&["deepinfer.io/drain"])), before);
        assert_eq!(merged(&[], &words(&["deepinfer.io/teardown"])), ["deepinfer.io/teardown"]);
    }
}

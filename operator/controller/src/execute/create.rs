//! Objects that are made once: pods, gangs, fabrics, Secrets, revisions, seeds.

use deepinfer_crds::names::manager;
use deepinfer_planner::{Kind, Object};
use k8s_openapi::ByteString;
use serde_json::{Value, json};

use super::{Done, Executor, On, body};
use crate::cache::UNSEEN_VERSION;
use crate::error::Error;
use crate::rest::{Call, Resource, Verb};

impl Executor {
    /// Makes an object that must not exist. One of the name that is ours already counts as made.
    pub(super) async fn create(&self, on: &On<'_>, object: &Object) -> Result<Done, Error> {
        // Who writes `spec.replicas` at creation is not who applies everything else.
        let manager = if object.kind() == Kind::Pool { manager::SEED } else { manager::MAIN };
        self.post(on, object, body(object, on.namespace()), manager).await
    }

    /// Makes the Secret with a key that only this process can derive.
    pub(super) async fn derive_key(
        &self,
        on: &On<'_>,
        secret: &Object,
        generation: u64,
    ) -> Result<Done, Error> {
        let key = ByteString(self.keys.hex(&on.cluster.uid, generation).into_bytes());
        let mut body = body(secret, on.namespace());
        body["type"] = json!("Opaque");
        body["data"] = json!({generation.to_string(): key});
        self.post(on, secret, body, manager::MAIN).await
    }

    async fn post(&self, on: &On<'_>, object: &Object, body: Value, manager: &str) -> Result<Done, Error> {
        let key = object.key();
        let resource = Resource::of_object(object);
        let call = Call {
            verb: Verb::Create,
            kind: Some(key.kind),
            what: key.to_string(),
            uri: format!("{}?fieldManager={manager}", resource.path(Some(on.namespace()))),
            content: "application/json",
            body,
        };
        match self.rest.call(call).await {
            Ok(value) if key.kind == Kind::Secret => {
                self.remember_secret(on, object, Some(&value));
                Ok(Done::Wrote)
            }
            Ok(value) => self.remember(on, "create", &key, value).map(|_| Done::Wrote),
            // It may not be read: that it is there is all that can be known.
            Err(error) if error.already_exists() && key.kind == Kind::Secret => {
                self.lessons.assumed_secret(&on.key);
                self.remember_secret(on, object, None);
                Ok(Done::Nothing)
            }
            Err(error) if error.already_exists() => match self.learn(on, &resource, &key).await? {
                Some(live) if live.controller_uid() == object.controller_uid() => Ok(Done::Nothing),
                Some(_) => Err(Error::Collision { key }),
                None => Err(error),
            },
            Err(error) => Err(error),
        }
    }

    /// A Secret without its data: that it exists is remembered, what is in it is not.
    fn remember_secret(&self, on: &On<'_>, secret: &Object, answer: Option<&Value>) {
        let mut known = secret.clone();
        let meta = known.meta_mut();
        meta.namespace = Some(on.namespace().to_owned());
        let told = |path: &str| answer.and_then(|value| value.pointer(path)?.as_str()).map(str::to_owned);
        // Unread, it has neither a UID nor a version: any will do, nobody compares them.
        meta.uid = told("/metadata/uid").or_else(|| Some(format!("{}/{}", on.cluster.uid, secret.name())));
        meta.resource_version =
            told("/metadata/resourceVersion").or_else(|| Some(UNSEEN_VERSION.to_string()));
        self.caches.wrote(on.namespace(), known);
    }
}

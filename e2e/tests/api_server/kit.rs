//! The server of this file, and clients of it in the name of different people.

use std::time::{Duration, Instant};

use deepinfer_controlplane::{ControlPlane, install, shared};
use deepinfer_crds::crd::Kind;
use deepinfer_crds::names::{API_VERSION, GROUP, VERSION, rbac};
use deepinfer_crds::policy;
use kube::api::{ApiResource, DynamicObject, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use serde_json::Value;
use tokio::sync::OnceCell;

/// The server with our kinds and policies.
pub struct Server {
    pub plane: &'static ControlPlane,
}

/// The server; `None` if this machine has none.
pub async fn server() -> Option<&'static Server> {
    static SERVER: OnceCell<Server> = OnceCell::const_new();
    let plane = shared().await?;
    let begin = || async move {
        install::crds(plane).await.expect("the kinds are installed");
        let policies = policy::yaml(rbac::OPERATOR_USER);
        plane.apply_yaml(&policies).await.expect("the policies are installed");
        let server = Server { plane };
        server.wait_for_policies().await;
        server
    };
    Some(SERVER.get_or_init(begin).await)
}

/// A user that may do everything, on both sides of the policies.
const ADMIN: (&str, &[&str]) = ("admin", &["system:masters", rbac::ADMINS_GROUP]);

impl Server {
    /// A client in the name of a user.
    pub async fn client_as(&self, user: &str, groups: &[&str]) -> Client {
        let path = self.plane.kubeconfig().expect("an administrator's kubeconfig");
        let file = Kubeconfig::read_from(path).expect("a kubeconfig");
        let mut config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
            .await
            .expect("a usable kubeconfig");
        config.auth_info.impersonate = Some(user.to_owned());
        let groups = groups.iter().chain([&"system:authenticated"]);
        config.auth_info.impersonate_groups = Some(groups.map(|g| (*g).to_owned()).collect());
        Client::try_from(config).expect("a client")
    }

    /// A client that may write everything.
    pub async fn admin(&self) -> Client {
        self.client_as(ADMIN.0, ADMIN.1).await
    }

    /// Objects of a kind.
    pub async fn api(&self, kind: Kind, namespace: &str) -> Api<DynamicObject> {
        api(self.admin().await, kind, namespace)
    }

    /// A fresh namespace.
    pub async fn namespace(&self, prefix: &str) -> String {
        self.plane.namespace(prefix).await.expect("a namespace")
    }

    /// Runs kubectl as the user that may write everything; its output if it succeeds.
    pub async fn kubectl(&self, args: &[&str]) -> String {
        let output = self.kubectl_any(args, "").await;
        assert!(output.good, "kubectl {args:?}: {}{}", output.out, output.err);
        output.out
    }

    /// Runs kubectl, however it ends.
    pub async fn kubectl_any(&self, args: &[&str], input: &str) -> Said {
        let mut all = vec!["--as", ADMIN.0];
        ADMIN.1.iter().for_each(|group| all.extend(["--as-group", group]));
        all.extend(args);
        let output = self.plane.kubectl_with(&all, input).await.expect("kubectl starts");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Said { good: output.status.success(), out: text(&output.stdout), err: text(&output.stderr) }
    }

    /// The API server takes up new policies a moment after they were made.
    async fn wait_for_policies(&self) {
        let namespace = self.namespace("policies-in-force").await;
        let nobody_special = self.client_as("somebody", &["system:masters"]).await;
        let api = api(nobody_special, Kind::Supernode, &namespace);
        let deadline = Instant::now() + Duration::from_secs(60);
        let probe = object(crate::cases::supernode());
        let params = PostParams { dry_run: true, ..PostParams::default() };
        while api.create(&params, &probe).await.is_ok() {
            assert!(Instant::now() < deadline, "the policies are not in force");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

/// What a program said.
pub struct Said {
    pub good: bool,
    pub out: String,
    pub err: String,
}

/// Objects of a kind as a client sees them.
pub fn api(client: Client, kind: Kind, namespace: &str) -> Api<DynamicObject> {
    let resource = ApiResource {
        group: GROUP.to_owned(),
        version: VERSION.to_owned(),
        api_version: API_VERSION.to_owned(),
        kind: kind.name().to_owned(),
        plural: kind.plural().to_owned(),
    };
    Api::namespaced_with(client, namespace, &resource)
}

/// JSON as an object.
pub fn object(value: Value) -> DynamicObject {
    serde_json::from_value(value).expect("an object")
}

/// A refusal: the whole message, and each field with its message.
pub struct Refusal {
    pub code: u16,
    pub message: String,
    pub causes: Vec<(String, String)>,
}

/// How the server refused; `None` if it accepted.
pub fn refusal<T>(outcome: kube::Result<T>) -> Option<Refusal> {
    match outcome {
        Ok(_) => None,
        Err(kube::Error::Api(status)) => {
            let causes = status.details.iter().flat_map(|d| d.causes.iter());
            let causes = causes.map(|c| (c.field.clone(), c.message.clone())).collect();
            Some(Refusal { code: status.code, message: status.message.clone(), causes })
        }
        Err(other) => panic!("no answer of the API server: {other}"),
    }
}

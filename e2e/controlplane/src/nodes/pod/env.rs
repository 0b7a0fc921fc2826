//! The environment of a container, and its command line.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context as _, bail};
use k8s_openapi::api::core::v1::{Container, EnvVar, EnvVarSource, Pod};

use super::super::sources::{Data, Kind, Sources};
use super::expand::{Mounts, expand};
use super::fields::{Addresses, field, resource};

/// The search path of containers that name none.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What a container runs.
#[derive(Clone, Debug)]
pub(crate) struct CommandLine {
    pub program: PathBuf,
    pub args: Vec<String>,
    pub env: BTreeMap<String, String>,
    /// What paths in its words mean.
    pub mounts: Mounts,
}

/// Where the values of an environment come from.
pub(crate) struct Surroundings<'a> {
    pub pod: &'a Pod,
    pub namespace: &'a str,
    pub addresses: Addresses<'a>,
    pub sources: &'a Sources,
}

/// The environment of a container: what the node adds, `envFrom`, then `env` in order.
pub(crate) async fn environment(
    container: &Container,
    around: &Surroundings<'_>,
    base: &[(String, String)],
    mounts: &Mounts,
) -> anyhow::Result<BTreeMap<String, String>> {
    let mut env = BTreeMap::from([("PATH".to_owned(), PATH.to_owned()), ("HOME".to_owned(), "/".to_owned())]);
    env.insert("HOSTNAME".to_owned(), around.pod.metadata.name.clone().unwrap_or_default());
    env.extend(base.iter().cloned());
    for source in container.env_from.iter().flatten() {
        let prefix = source.prefix.as_deref().unwrap_or_default();
        let (kind, name, optional) = match (&source.secret_ref, &source.config_map_ref) {
            (Some(secret), _) => (Kind::Secret, &secret.name, secret.optional),
            (None, Some(map)) => (Kind::ConfigMap, &map.name, map.optional),
            (None, None) => continue,
        };
        let data = around.sources.required(kind, around.namespace, name, optional).await?;
        for (key, value) in data.unwrap_or_default() {
            env.insert(format!("{prefix}{key}"), String::from_utf8_lossy(&value).into_owned());
        }
    }
    for variable in container.env.iter().flatten() {
        if let Some(value) = value_of(variable, container, around, &env).await? {
            env.insert(variable.name.clone(), mounts.apply(&value));
        }
    }
    Ok(env)
}

/// The value of one variable; None if an optional reference has none.
async fn value_of(
    variable: &EnvVar,
    container: &Container,
    around: &Surroundings<'_>,
    known: &BTreeMap<String, String>,
) -> anyhow::Result<Option<String>> {
    let Some(from) = &variable.value_from else {
        let text = variable.value.as_deref().unwrap_or_default();
        return Ok(Some(expand(text, |name| known.get(name).cloned())));
    };
    referenced(from, container, around).await.with_context(|| format!("env {} has no value", variable.name))
}

async fn referenced(
    from: &EnvVarSource,
    container: &Container,
    around: &Surroundings<'_>,
) -> anyhow::Result<Option<String>> {
    if let Some(reference) = &from.field_ref {
        let value = field(around.pod, &reference.field_path, around.addresses);
        return Ok(Some(value.with_context(|| format!("unknown field {}", reference.field_path))?));
    }
    if let Some(selector) = &from.resource_field_ref {
        let value = resource(container, selector);
        return Ok(Some(value.with_context(|| format!("unknown resource {}", selector.resource))?));
    }
    let (kind, name, key, optional) = match (&from.secret_key_ref, &from.config_map_key_ref) {
        (Some(secret), _) => (Kind::Secret, &secret.name, &secret.key, secret.optional),
        (None, Some(map)) => (Kind::ConfigMap, &map.name, &map.key, map.optional),
        (None, None) => bail!("a kind of valueFrom that process nodes do not know"),
    };
    let data = around.sources.required(kind, around.namespace, name, optional).await?;
    item(data, name, key, optional)
}

fn item(data: Option<Data>, name: &str, key: &str, optional: Option<bool>) -> anyhow::Result<Option<String>> {
    match data.and_then(|mut d| d.remove(key)) {
        Some(value) => Ok(Some(String::from_utf8_lossy(&value).into_owned())),
        None if optional == Some(true) => Ok(None),
        None => bail!("couldn't find key {key} in {name}"),
    }
}

/// The command line: the image's program, unless `command` names another, and the arguments.
///
/// The first word of `command` is a path inside an image that does not exist here. If its last part is the name of
/// the image's program it means that program; else it is looked up on this machine, as a shell would.
pub(crate) fn command_line(
    container: &Container,
    entrypoint: PathBuf,
    env: BTreeMap<String, String>,
    mounts: &Mounts,
) -> anyhow::Result<CommandLine> {
    let lookup = |name: &str| env.get(name).cloned();
    let real = |words: &Option<Vec<String>>| -> Vec<String> {
        words.iter().flatten().map(|word| mounts.apply(&expand(word, lookup))).collect()
    };
    let mut command = real(&container.command).into_iter();
    let program = match command.next() {
        None => entrypoint,
        Some(word) => program(&word, entrypoint, env.get("PATH").map_or(PATH, String::as_str))?,
    };
    let args = command.chain(real(&container.args)).collect();
    Ok(CommandLine { program, args, env, mounts: mounts.clone() })
}

/// The program that the first word of a command means.
fn program(word: &str, entrypoint: PathBuf, path: &str) -> anyhow::Result<PathBuf> {
    let name = word.rsplit('/').next().unwrap_or(word);
    if entrypoint.file_name().is_some_and(|f| f.to_string_lossy() == name) {
        return Ok(entrypoint);
    }
    if word.contains('/') {
        let given = PathBuf::from(word);
        return if given.is_file() { Ok(given) } else { bail!("exec: \"{word}\": no such file") };
    }
    let found = path.split(':').map(|folder| PathBuf::from(folder).join(word)).find(|p| p.is_file());
    found.with_context(|| format!("exec: \"{word}\": executable file not found in $PATH"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_word_of_a_command_finds_its_program() {
        let entry = || PathBuf::from("/target/deepinfer-agent");
        assert_eq!(program("/usr/bin/deepinfer-agent", entry(), PATH).unwrap(), entry());
        assert_eq!(program("/bin/sh", entry(), PATH).unwrap(), PathBuf::from("/bin/sh"));
        assert!(program("sh", entry(), PATH).unwrap().ends_with("sh"));
        assert!(program("no-such-program-here", entry(), PATH).is_err());
    }

    #[test]
    fn arguments_see_the_environment_and_the_mounts() {
        let container: Container = serde_json::from_value(serde_json::json!({
            "name": "c", "args": ["--name=$(POD_NAME)", "--key-dir=/keys", "$(NONE)"]
        }))
        .unwrap();
        let env = BTreeMap::from([("POD_NAME".to_owned(), "p-1".to_owned())]);
        let mounts = Mounts::new([("/keys".to_owned(), PathBuf::from("/t/keys"))]);
        let line = command_line(&container, PathBuf::from("/bin/sh"), env, &mounts).unwrap();
        assert_eq!(line.args, ["--name=p-1", "--key-dir=/t/keys", "$(NONE)"]);
    }
}

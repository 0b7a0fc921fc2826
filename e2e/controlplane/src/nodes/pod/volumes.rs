//! The volumes of a pod, as folders of this machine.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use k8s_openapi::api::core::v1::{
    Container, DownwardAPIVolumeFile, HostPathVolumeSource, KeyToPath, Pod, ProjectedVolumeSource, Volume,
};

use super::super::sources::{Data, Kind};
use super::context::Context;
use super::env::Surroundings;
use super::expand::{Mounts, expand};
use super::fields::{field, resource};
use super::files::{self, File, Files};

/// Mode of files that name none.
const MODE: i32 = 0o644;

/// Where each volume of a pod lies, by its name.
pub(crate) type Folders = BTreeMap<String, PathBuf>;

/// Makes all volumes of a pod and brings what is in them up to date. An error says which volume cannot be made.
pub(crate) async fn materialise(context: &Context, pod: &Pod) -> anyhow::Result<Folders> {
    let mut folders = Folders::new();
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    for volume in volumes {
        let folder = one(context, pod, volume).await.with_context(|| format!("volume {}", volume.name))?;
        folders.insert(volume.name.clone(), folder);
    }
    Ok(folders)
}

async fn one(context: &Context, pod: &Pod, volume: &Volume) -> anyhow::Result<PathBuf> {
    if let Some(path) = &volume.host_path {
        return host_path(context, path);
    }
    if let Some(claim) = &volume.persistent_volume_claim {
        let claims = &context.shared.options.claims;
        let full = format!("{}/{}", context.namespace, claim.claim_name);
        let known = claims.get(&full).or_else(|| claims.get(&claim.claim_name));
        return match known {
            Some(folder) => Ok(folder.clone()),
            None => {
                let path = context.shared.sources.claim(&context.namespace, &claim.claim_name).await?;
                Ok(context.shared.options.on_this_machine(&path))
            }
        };
    }
    let folder = context.folder.join("volumes").join(&volume.name);
    if volume.empty_dir.is_some() {
        std::fs::create_dir_all(&folder)?;
        return Ok(folder);
    }
    let Some(files) = files_of(context, pod, volume).await? else {
        bail!("process nodes do not know this kind of volume");
    };
    let scratch = context.folder.join(format!("scratch-{}", volume.name));
    files::write(&folder, &scratch, &files)?;
    Ok(folder)
}

fn host_path(context: &Context, source: &HostPathVolumeSource) -> anyhow::Result<PathBuf> {
    let path = context.shared.options.on_this_machine(Path::new(&source.path));
    match source.type_.as_deref().unwrap_or_default() {
        "DirectoryOrCreate" => std::fs::create_dir_all(&path)?,
        "Directory" if !path.is_dir() => bail!("hostPath {} is not a directory", source.path),
        "File" if !path.is_file() => bail!("hostPath {} is not a file", source.path),
        _ => {}
    }
    Ok(path)
}

/// The files of a volume that is made of objects; None if it is of another kind.
async fn files_of(context: &Context, pod: &Pod, volume: &Volume) -> anyhow::Result<Option<Files>> {
    let around = context.surroundings(pod);
    let mut files = Files::new();
    if let Some(secret) = &volume.secret {
        let name = secret.secret_name.as_deref().unwrap_or_default();
        let pick = Pick { items: &secret.items, mode: secret.default_mode, optional: secret.optional };
        keyed(&around, Kind::Secret, name, pick, &mut files).await?;
    } else if let Some(map) = &volume.config_map {
        let pick = Pick { items: &map.items, mode: map.default_mode, optional: map.optional };
        keyed(&around, Kind::ConfigMap, &map.name, pick, &mut files).await?;
    } else if let Some(downward) = &volume.downward_api {
        fields(&around, downward.items.iter().flatten(), downward.default_mode, &mut files)?;
    } else if let Some(projected) = &volume.projected {
        project(context, &around, projected, &mut files).await?;
    } else {
        return Ok(None);
    }
    Ok(Some(files))
}

async fn project(
    context: &Context,
    around: &Surroundings<'_>,
    volume: &ProjectedVolumeSource,
    files: &mut Files,
) -> anyhow::Result<()> {
    let mode = volume.default_mode;
    for source in volume.sources.iter().flatten() {
        if let Some(secret) = &source.secret {
            let pick = Pick { items: &secret.items, mode, optional: secret.optional };
            keyed(around, Kind::Secret, &secret.name, pick, files).await?;
        } else if let Some(map) = &source.config_map {
            let pick = Pick { items: &map.items, mode, optional: map.optional };
            keyed(around, Kind::ConfigMap, &map.name, pick, files).await?;
        } else if let Some(downward) = &source.downward_api {
            fields(around, downward.items.iter().flatten(), mode, files)?;
        } else if let Some(token) = &source.service_account_token {
            let lifetime = u64::try_from(token.expiration_seconds.unwrap_or(3600)).unwrap_or(3600);
            let lifetime = Duration::from_secs(lifetime);
            let content = context.token(around.pod, token.audience.as_deref(), lifetime).await?;
            insert(files, &token.path, content.into_bytes(), mode)?;
        } else {
            bail!("process nodes do not know this kind of projection");
        }
    }
    Ok(())
}

/// Which keys of an object become files.
struct Pick<'a> {
    items: &'a Option<Vec<KeyToPath>>,
    mode: Option<i32>,
    optional: Option<bool>,
}

async fn keyed(
    around: &Surroundings<'_>,
    kind: Kind,
    name: &str,
    pick: Pick<'_>,
    files: &mut Files,
) -> anyhow::Result<()> {
    let data: Option<Data> = around.sources.required(kind, around.namespace, name, pick.optional).await?;
    let Some(mut data) = data else { return Ok(()) };
    let Some(items) = pick.items else {
        return data.into_iter().try_for_each(|(key, value)| insert(files, &key, value, pick.mode));
    };
    for item in items {
        match data.remove(&item.key) {
            Some(value) => insert(files, &item.path, value, item.mode.or(pick.mode))?,
            None if pick.optional == Some(true) => {}
            None => bail!("\"{name}\" has no key {}", item.key),
        }
    }
    Ok(())
}

fn fields<'a>(
    around: &Surroundings<'_>,
    items: impl Iterator<Item = &'a DownwardAPIVolumeFile>,
    mode: Option<i32>,
    files: &mut Files,
) -> anyhow::Result<()> {
    for item in items {
        let value = if let Some(reference) = &item.field_ref {
            field(around.pod, &reference.field_path, around.addresses)
                .with_context(|| format!("unknown field {}", reference.field_path))?
        } else if let Some(selector) = &item.resource_field_ref {
            let name = selector.container_name.as_deref().unwrap_or_default();
            let container = around.pod.spec.iter().flat_map(|s| &s.containers).find(|c| c.name == name);
            container
                .and_then(|c| resource(c, selector))
                .with_context(|| format!("no {} of {name:?}", selector.resource))?
        } else {
            bail!("the file {} names no field", item.path);
        };
        insert(files, &item.path, value.into_bytes(), item.mode.or(mode))?;
    }
    Ok(())
}

fn insert(files: &mut Files, path: &str, content: Vec<u8>, mode: Option<i32>) -> anyhow::Result<()> {
    let mode = u32::try_from(mode.unwrap_or(MODE)).context("a mode is not negative")?;
    files.insert(PathBuf::from(path), File { content, mode });
    Ok(())
}

/// The mounts of a container, given the folders of its pod's volumes. `message` is where its last words go.
pub(crate) fn mounts(
    container: &Container,
    folders: &Folders,
    env: impl Fn(&str) -> Option<String>,
    message: &Path,
) -> anyhow::Result<Mounts> {
    let path = container.termination_message_path.as_deref().unwrap_or("/dev/termination-log");
    let mut pairs = vec![(path.to_owned(), message.to_owned())];
    for mount in container.volume_mounts.iter().flatten() {
        let folder = folders.get(&mount.name).with_context(|| format!("no volume {}", mount.name))?;
        let inner = match (&mount.sub_path, &mount.sub_path_expr) {
            (Some(path), _) => Some(path.clone()),
            (None, Some(text)) => Some(expand(text, &env)),
            (None, None) => None,
        };
        let real = match inner.filter(|path| !path.is_empty()) {
            Some(path) => folder.join(path),
            None => folder.clone(),
        };
        // Nothing is made outside the pod's own folder: a path of the machine that is not there stays missing.
        if !real.exists() && message.parent().is_some_and(|own| real.starts_with(own)) {
            std::fs::create_dir_all(&real).with_context(|| format!("cannot make {}", real.display()))?;
        }
        pairs.push((mount.mount_path.clone(), real));
    }
    Ok(Mounts::new(pairs))
}

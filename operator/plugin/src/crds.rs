//! `crds`: the definitions of this release, and whether the installed ones fit it.

use std::fmt::Write as _;

use anyhow::Result;
use deepinfer_crds::crd::{Kind, definition};
use deepinfer_crds::names::{GROUP, SCHEMA_REVISION, annotation};
use deepinfer_crds::policy;
use k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicy;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;

use crate::args::PrintArgs;
use crate::client::Session;
use crate::output::{self, Outcome};
use deepinfer_crds::table::columns;

/// How definitions are installed or brought up to date.
const INSTALL: &str = "kubectl deepinfer crds print | kubectl apply --server-side --force-conflicts -f -";

/// Prints the definitions.
///
/// # Errors
/// If standard output cannot be written.
pub fn print(args: &PrintArgs) -> Result<Outcome> {
    let mut text = String::new();
    for kind in Kind::ALL {
        let _ = writeln!(text, "---\n{}", definition(kind).yaml().trim_end());
    }
    if !args.without_policies {
        text += &policy::yaml(&args.operator_user);
    }
    output::print(&text)?;
    Ok(Outcome::Good)
}

/// How an installed definition compares with ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fit {
    Missing,
    Older(u32),
    Same,
    Newer(u32),
    NotEstablished,
    /// Somebody else's, or damaged: it has no revision.
    Unknown,
}

/// Compares the installed definitions.
///
/// # Errors
/// If the API server cannot be asked.
pub async fn check(session: &Session) -> Result<Outcome> {
    let api = session.cluster_wide::<CustomResourceDefinition>();
    let mut fits = Vec::new();
    for kind in Kind::ALL {
        let name = format!("{}.{GROUP}", kind.plural());
        let found = api
            .get_opt(&name)
            .await
            .map_err(|e| session.explain(e, &format!("cannot read the CRD {name}")))?;
        fits.push((name, fit(found.as_ref())));
    }
    let policies = session.cluster_wide::<ValidatingAdmissionPolicy>();
    let mut absent = Vec::new();
    for policy in policy::policies("") {
        let name = policy.policy.metadata.name.unwrap_or_default();
        // Policies are optional, and so is the right to read them.
        if matches!(policies.get_opt(&name).await, Ok(None)) {
            absent.push(name);
        }
    }
    output::print(&text(&fits, &absent))?;
    Ok(Outcome::problem_if(fits.iter().any(|(_, fit)| !matches!(fit, Fit::Same | Fit::Newer(_)))))
}

fn fit(installed: Option<&CustomResourceDefinition>) -> Fit {
    let Some(installed) = installed else { return Fit::Missing };
    let mut conditions = installed.status.iter().flat_map(|s| s.conditions.iter().flatten());
    if !conditions.any(|c| c.type_ == "Established" && c.status == "True") {
        return Fit::NotEstablished;
    }
    let annotations = installed.metadata.annotations.as_ref();
    let revision =
        annotations.and_then(|a| a.get(annotation::SCHEMA_REVISION)).and_then(|r| r.parse::<u32>().ok());
    match revision {
        None => Fit::Unknown,
        Some(revision) if revision < SCHEMA_REVISION => Fit::Older(revision),
        Some(revision) if revision > SCHEMA_REVISION => Fit::Newer(revision),
        Some(_) => Fit::Same,
    }
}

fn text(fits: &[(String, Fit)], absent: &[String]) -> String {
    let row = |(name, fit): &(String, Fit)| {
        let (revision, verdict) = match fit {
            Fit::Missing => ("-".to_owned(), "not installed"),
            Fit::Older(r) => (r.to_string(), "older than this release: an operator of it changes nothing"),
            Fit::Same => (SCHEMA_REVISION.to_string(), "as this release"),
            Fit::Newer(r) => (r.to_string(), "newer than this release, which is fine"),
            Fit::NotEstablished => ("-".to_owned(), "not established: see kubectl describe crd"),
            Fit::Unknown => ("-".to_owned(), "without a schema revision: not installed from this product"),
        };
        vec![name.clone(), revision, SCHEMA_REVISION.to_string(), verdict.to_owned()]
    };
    let mut text =
        columns(&["DEFINITION", "INSTALLED", "WANTED", ""], &fits.iter().map(row).collect::<Vec<_>>());
    for name in absent {
        let _ = writeln!(
            text,
            "admission policy {name} is not installed: anybody with edit rights may write what it guards"
        );
    }
    if fits.iter().any(|(_, fit)| !matches!(fit, Fit::Same | Fit::Newer(_))) {
        let _ = writeln!(
            text,
            "\nBring them up to date, definitions first and the operator second:\n  {INSTALL}"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn installed(revision: &str) -> CustomResourceDefinition {
        let mut object = definition(Kind::Pool).object().clone();
        object["metadata"]["annotations"][annotation::SCHEMA_REVISION] = revision.into();
        object["status"] = serde_json::json!({
            "acceptedNames": {"kind": "DeepInferPool", "plural": "deepinferpools"}, "storedVersions": ["v1alpha1"],
            "conditions": [{"type": "Established", "status": "True"}],
        });
        serde_json::from_value(object).expect("a CRD")
    }

    #[test]
    fn older_definitions_are_a_problem_and_newer_ones_are_not() {
        assert_eq!(fit(Some(&installed("0"))), Fit::Older(0));
        assert_eq!(fit(Some(&installed(&SCHEMA_REVISION.to_string()))), Fit::Same);
        assert_eq!(fit(Some(&installed("4000"))), Fit::Newer(4000));
        assert_eq!(fit(None), Fit::Missing);
        let text = text(&[("a".to_owned(), Fit::Older(0))], &["p".to_owned()]);
        assert!(text.contains("crds print | kubectl apply") && text.contains("policy p"), "{text}");
    }
}

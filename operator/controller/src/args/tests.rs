//! Flags as people write them.

use clap::CommandFactory;

use super::*;

fn run(flags: &[&str]) -> Result<RunArgs, clap::Error> {
    let words = ["deepinfer-operator", "run"].into_iter().chain(flags.iter().copied());
    Cli::try_parse_from(words).map(|cli| match cli.command {
        Command::Run(args) => *args,
        other => panic!("{other:?}"),
    })
}

#[test]
fn the_flags_are_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn an_operator_without_flags_has_the_times_of_the_contract() {
    let args = run(&[]).unwrap();
    assert_eq!(args.lease_duration, Duration::from_secs(15));
    assert_eq!(args.lease_renew_deadline, Duration::from_secs(10));
    assert_eq!(args.lease_retry, Duration::from_secs(2));
    assert_eq!(args.agents.leader_interval, Duration::from_secs(1));
    assert_eq!(args.agents.timeout, Duration::from_secs(2));
    let target = args.target().unwrap();
    assert_eq!(target.fleet_urls, "http://deepinfer-operator.deepinfer-system:8082");
    assert_eq!(target, KubernetesTarget::new(image("deepinfer-gateway"), target.fleet_urls.clone()));
}

#[test]
fn another_release_is_played_by_flags() {
    let args = run(&["--release=9.9.9", "--default=min_ready=7", "--schema-revision=99"]).unwrap();
    let target = args.target().unwrap();
    assert_eq!((target.release.as_str(), target.defaults.min_ready.value), ("9.9.9", 7));
    let error = run(&["--default=nonsense=7"]).unwrap().target().unwrap_err().to_string();
    assert!(error.contains("nonsense") && error.contains("min_ready"), "{error}");
}

#[test]
fn profiles_of_a_file_join_the_built_in_ones_and_errors_name_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("profiles.yaml");
    std::fs::write(&path, "lab:\n  domainLabels: [lab.example/rack]\n  volcanoTier: 2\n").unwrap();
    let flag = format!("--profiles={}", path.display());
    let target = run(&[&flag]).unwrap().target().unwrap();
    assert_eq!(target.profiles["lab"].domain_labels, ["lab.example/rack"]);
    assert_eq!(target.profiles.len(), Profile::built_in().len() + 1);
    std::fs::write(&path, "lab: {domainLabel: x}\n").unwrap();
    let error = run(&[&flag]).unwrap().target().unwrap_err().to_string();
    assert!(error.contains("profiles.yaml") && error.contains("domainLabel"), "{error}");
}

#[test]
fn nonsense_is_refused_with_the_flag_named() {
    for flag in ["--resync-seconds=0", "--fleet-url=https://a:1", "--fleet-url=http://a/b", "--concurrency=0"]
    {
        let error = run(&[flag]).unwrap_err().to_string();
        assert!(error.contains(flag.split('=').next().unwrap()), "{error}");
    }
    assert_eq!(run(&["--fleet-url=http://a:1/,http://b:2"]).unwrap().fleet_urls(), "http://a:1,http://b:2");
}

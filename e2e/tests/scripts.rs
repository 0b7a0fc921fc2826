//! Planning stories: each file of `e2e/scripts` is told to the planner and compared with its text in `e2e/expected`.
//!
//! After a change that is meant: `cargo test -p deepinfer-e2e --test scripts -- --ignored`, and review the diff.

use std::fs;
use std::path::{Path, PathBuf};

use deepinfer_crds::DeepInferCluster;
use deepinfer_planner::script;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn load(name: &str) -> Result<DeepInferCluster, String> {
    let path = folder("../examples/clusters").join(format!("{name}.yaml"));
    let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    serde_yaml::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))
}

fn stories() -> Vec<(String, String)> {
    let mut stories: Vec<(String, String)> = fs::read_dir(folder("scripts"))
        .expect("the folder of stories")
        .map(|entry| {
            let path = entry.expect("an entry").path();
            let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
            let script = fs::read_to_string(&path).expect("a story");
            let text =
                script::run(&script, &load).unwrap_or_else(|error| panic!("{}\n{name}: {error}", error.told));
            (name, text)
        })
        .collect();
    stories.sort();
    stories
}

#[test]
fn every_story_is_told_as_it_was() {
    let stories = stories();
    assert!(stories.len() >= 7, "{} stories", stories.len());
    for (name, text) in stories {
        let path = folder("expected").join(format!("{name}.txt"));
        let expected =
            fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        for (line, (told, known)) in text.lines().zip(expected.lines()).enumerate() {
            assert_eq!(told, known, "{name}, line {}", line + 1);
        }
        assert_eq!(text.lines().count(), expected.lines().count(), "{name}: number of lines");
    }
}

#[test]
#[ignore = "writes e2e/expected anew"]
fn write_expected() {
    for (name, text) in stories() {
        fs::write(folder("expected").join(format!("{name}.txt")), text).expect("a file to write");
    }
}

//! Writes the ustar format: headers of 512 bytes, contents padded to 512, two empty blocks at the end.
//! Invariant: any tar reads what is written here; names that do not fit are an error, never cut.

use std::io::{self, Write};

const BLOCK: usize = 512;
/// Longest last part and longest path in front of it, in bytes.
const NAME_MAX: usize = 100;
const PREFIX_MAX: usize = 155;

/// An archive being written.
pub struct Tar<W> {
    out: W,
    /// Time of all entries, in seconds since 1970.
    time: u64,
}

impl<W: Write> Tar<W> {
    /// Begins an archive.
    pub fn new(out: W, time: u64) -> Self {
        Self { out, time }
    }

    /// Adds a file that only its owner may read.
    ///
    /// # Errors
    /// If the name does not fit, or writing fails.
    pub fn file(&mut self, path: &str, contents: &[u8]) -> io::Result<()> {
        self.out.write_all(&header(path, contents.len() as u64, self.time)?)?;
        self.out.write_all(contents)?;
        let rest = contents.len() % BLOCK;
        if rest > 0 {
            self.out.write_all(&[0; BLOCK][rest..])?;
        }
        Ok(())
    }

    /// Ends the archive.
    ///
    /// # Errors
    /// If writing fails.
    pub fn finish(mut self) -> io::Result<()> {
        self.out.write_all(&[0; 2 * BLOCK])?;
        self.out.flush()
    }
}

fn header(path: &str, size: u64, time: u64) -> io::Result<[u8; BLOCK]> {
    let (prefix, name) = split(path).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidInput, format!("{path} is too long for an archive"))
    })?;
    let mut block = [0; BLOCK];
    let mut put = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, name.as_bytes());
    put(100, b"0000600\0");
    put(108, b"0000000\0");
    put(116, b"0000000\0");
    put(124, format!("{size:011o}\0").as_bytes());
    put(136, format!("{time:011o}\0").as_bytes());
    // The checksum counts its own field as spaces.
    put(148, b"        ");
    put(156, b"0");
    put(257, b"ustar\x0000");
    put(345, prefix.as_bytes());
    let sum: u32 = block.iter().map(|b| u32::from(*b)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    Ok(block)
}

/// Prefix and name, cut at a slash so that both fit.
fn split(path: &str) -> Option<(&str, &str)> {
    if path.len() <= NAME_MAX {
        return Some(("", path));
    }
    path.match_indices('/')
        .map(|(at, _)| (&path[..at], &path[at + 1..]))
        .find(|(prefix, name)| prefix.len() <= PREFIX_MAX && !name.is_empty() && name.len() <= NAME_MAX)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn the_tar_of_this_machine_unpacks_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let archive = folder.path().join("a.tar");
        let mut tar = Tar::new(std::fs::File::create(&archive).expect("a file"), 1_700_000_000);
        let deep = format!("top/{}/{}", "d".repeat(60), "f".repeat(60));
        let long = vec![b'x'; 1500];
        for (name, contents) in [("top/a.txt", &b"hello\n"[..]), ("top/empty", b""), (&deep, &long)] {
            tar.file(name, contents).expect("an entry");
        }
        tar.finish().expect("an end");
        let out = Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(folder.path()).output();
        let out = out.expect("tar is installed");
        assert!(out.status.success() && out.stderr.is_empty(), "{}", String::from_utf8_lossy(&out.stderr));
        assert_eq!(std::fs::read(folder.path().join("top/a.txt")).expect("a.txt"), b"hello\n");
        assert_eq!(std::fs::read(folder.path().join(&deep)).expect("the deep one"), long);
        assert_eq!(std::fs::read(folder.path().join("top/empty")).expect("empty"), b"");
    }

    #[test]
    fn a_name_that_does_not_fit_is_refused() {
        let error = Tar::new(Vec::new(), 0).file(&"x".repeat(101), b"").expect_err("too long");
        assert!(error.to_string().contains("too long"));
    }
}

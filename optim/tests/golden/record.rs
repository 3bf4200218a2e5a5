//! Compares digests of results with a recorded file, for results that are bit-identical on every processor.

use std::collections::BTreeMap;

/// Digests by name, in name order.
#[derive(Default)]
pub(crate) struct Record {
    found: BTreeMap<String, u64>,
    skipped: Vec<String>,
}

impl Record {
    /// Adds the FNV-1a digest of 32-bit words. Two results that differ in exactly one word have different digests.
    ///
    /// # Panics
    /// Panics if the name has been added before.
    pub(crate) fn add(&mut self, name: impl Into<String>, words: impl IntoIterator<Item = u32>) {
        let step = |hash: u64, word: u32| (hash ^ u64::from(word)).wrapping_mul(0x0000_0100_0000_01B3);
        let digest = words.into_iter().fold(0xCBF2_9CE4_8422_2325, step);
        let name = name.into();
        assert!(self.found.insert(name.clone(), digest).is_none(), "duplicate name {name}");
    }

    /// Skips a digest on this machine.
    #[allow(dead_code, reason = "not every test that includes this file skips digests")]
    pub(crate) fn skip(&mut self, name: String, why: &str) {
        println!("skipped: {name}: {why}");
        self.skipped.push(name);
    }

    /// Compares with the file at `path`, or writes the file if `UPDATE_GOLDEN` is set; skipped digests keep their
    /// recorded value.
    ///
    /// # Panics
    /// Panics if digests differ, or if the file has different names.
    pub(crate) fn compare(self, path: &str) {
        let recorded: BTreeMap<String, u64> = std::fs::read_to_string(path).map_or(BTreeMap::new(), |text| {
            let line = |line: &str| {
                let (digest, name) = line.split_once(' ').expect("a digest and a name");
                (name.to_string(), u64::from_str_radix(digest, 16).expect("a digest"))
            };
            text.lines().map(line).collect()
        });
        let mut expected = recorded.clone();
        expected.retain(|name, _| !self.skipped.contains(name));
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            let mut all = self.found;
            all.extend(recorded.into_iter().filter(|(name, _)| self.skipped.contains(name)));
            let text: String = all.iter().map(|(name, digest)| format!("{digest:016x} {name}\n")).collect();
            return std::fs::write(path, text).expect("the file can be written");
        }
        let differ: Vec<&String> =
            self.found.iter().filter(|&(n, d)| expected.get(n) != Some(d)).map(|(n, _)| n).collect();
        let missing: Vec<&String> = expected.keys().filter(|&name| !self.found.contains_key(name)).collect();
        assert!(
            differ.is_empty() && missing.is_empty(),
            "{} of {} results differ from {path}: {differ:?}; not computed: {missing:?}",
            differ.len(),
            self.found.len(),
        );
        println!("{} results have the recorded bits", self.found.len());
    }
}

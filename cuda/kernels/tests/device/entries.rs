//! Loads every entry of every source and checks its resource use. `--nocapture` prints a line of JSON for each.

use std::collections::BTreeSet;

use zero_kernels::Source;

use crate::card::{Card, mock};

/// Local memory per thread, in bytes, that needs no justification: small spills stay in the L1 cache.
const FEW_BYTES: u32 = 32;
/// Entries that use more, each with the reason.
const LARGER: [(&str, &str); 0] = [];

/// Includes the text of a source file at compile time.
macro_rules! text {
    ($name:literal) => {
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/cu/", $name, ".cu"))
    };
}

fn text(source: Source) -> &'static str {
    match source {
        Source::Activation => text!("activation"),
        Source::Attention => text!("attention"),
        Source::AttentionTensor => text!("attention_tensor"),
        Source::BlockCodes => text!("block_codes"),
        Source::CrossEntropy => text!("cross_entropy"),
        Source::Dropout => text!("dropout"),
        Source::Embedding => text!("embedding"),
        Source::Indices => text!("indices"),
        Source::Norm => text!("norm"),
        Source::Optimizer => text!("optimizer"),
        Source::Rotary => text!("rotary"),
        Source::Rows => text!("rows"),
    }
}

/// Returns the entries that `ENTRY` and `KERNEL` define at the start of a line. Entries of other macros are missing
/// here, but the driver finds them.
fn written(source: Source) -> Vec<String> {
    let names = |line: &str| {
        let (kind, rest) = line.split_once('(')?;
        let name = rest.split_once(',')?.0;
        match kind {
            "ENTRY" => Some(vec![name.to_owned()]),
            "KERNEL" => Some(["f32", "bf16", "f16"].map(|suffix| format!("{name}_{suffix}")).into()),
            _ => None,
        }
    };
    text(source).lines().filter_map(names).flatten().collect()
}

#[test]
fn every_entry_loads_and_stays_within_its_limits() {
    let Some(card) = Card::shared() else { return };
    card.kernels.load_all().unwrap();
    let (mut all, mut larger) = (BTreeSet::new(), vec![]);
    for source in Source::ALL {
        let entries = card.kernels.footprints(source).unwrap();
        assert!(!entries.is_empty(), "{source:?} has no entries");
        for (entry, of) in &entries {
            println!(
                r#"{{"entry": "{entry}", "source": "{}", "registers": {}, "local_bytes": {}, "shared_bytes": {}, "most_threads": {}}}"#,
                source.name(),
                of.registers,
                of.local_bytes,
                of.shared_bytes,
                of.most_threads
            );
            if of.local_bytes > FEW_BYTES && LARGER.iter().all(|(name, _)| name != entry) {
                larger.push(format!("{entry}: {} local bytes", of.local_bytes));
            }
            assert!(all.insert(entry.clone()), "two entries are called {entry}");
        }
        for name in written(source) {
            assert!(entries.iter().any(|(entry, _)| *entry == name), "{name} of {source:?} was not found");
        }
    }
    println!("{} entries", all.len());
    assert!(larger.is_empty(), "{larger:?}");
    assert!(LARGER.iter().all(|(name, _)| all.contains(*name)), "LARGER names an entry that does not exist");
    // On a GPU, every entry uses registers. A count of 0 would mean that the count does not come from the driver.
    if mock::is_real() && std::env::var_os("CARD_MOCK").is_none() {
        let of = |source| card.kernels.footprints(source).unwrap();
        assert!(Source::ALL.into_iter().flat_map(of).all(|(_, of)| of.registers > 0 && of.most_threads > 0));
    }
}

#[test]
fn kernel_images_are_aligned() {
    for source in Source::ALL {
        assert_eq!(source.image().as_ptr().addr() % 16, 0, "{source:?}");
        assert!(!mock::is_real() || !source.image().is_empty(), "this program was built without kernels");
    }
}

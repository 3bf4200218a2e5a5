//! The name of the processor and, on aarch64, its vector features, for reports and `zero-train doctor`.
//!
//! On x86-64, `/proc/cpuinfo` contains the name. On aarch64, it contains only the fields of the register MIDR_EL1,
//! which the tables below translate to names. The tables are from Arm's reference manuals, Linux's
//! `arch/arm64/include/asm/cputype.h` and, for Apple, m1n1's `midr.h`.

use std::fmt::Write;
use std::fs;

/// Returns the name of this machine's processor. If it has several kinds of cores, returns the name and count of each
/// kind. `None` if the system does not provide a name.
#[must_use]
pub fn name() -> Option<String> {
    named(&fs::read_to_string("/proc/cpuinfo").ok()?)
}

/// Returns the vector features that the system lets programs use.
#[cfg(target_arch = "aarch64")]
#[must_use]
pub fn vector_features() -> Vec<&'static str> {
    use std::arch::is_aarch64_feature_detected as has;
    let known = [
        ("NEON", has!("neon")),
        ("SVE", has!("sve")),
        ("SVE2", has!("sve2")),
        ("BF16", has!("bf16")),
        ("I8MM", has!("i8mm")),
    ];
    known.into_iter().filter(|(_, here)| *here).map(|(name, _)| name).collect()
}

/// Parses the text of `/proc/cpuinfo`, which has a paragraph for each core.
fn named(cpuinfo: &str) -> Option<String> {
    let mut kinds: Vec<(String, usize)> = vec![];
    for core in cpuinfo.split("\n\n") {
        let field = |wanted: &str| {
            let mut fields = core.lines().filter_map(|line| line.split_once(':'));
            fields.find(|(name, _)| name.trim() == wanted).map(|(_, value)| value.trim())
        };
        let number = |wanted: &str| u32::from_str_radix(field(wanted)?.strip_prefix("0x")?, 16).ok();
        let name = match (number("CPU implementer"), number("CPU part"), field("model name")) {
            (Some(implementer), Some(part), _) => core_name(implementer, part),
            (_, _, Some(name)) => name.to_string(),
            _ => continue,
        };
        match kinds.iter_mut().find(|(known, _)| *known == name) {
            Some((_, count)) => *count += 1,
            None => kinds.push((name, 1)),
        }
    }
    match &kinds[..] {
        [] => None,
        [(name, _)] => Some(name.clone()),
        several => Some(several.iter().map(|(name, count)| format!("{count} × {name}")).collect::<Vec<_>>().join(", ")),
    }
}

/// Returns a core's name; unknown implementers and parts are printed as numbers.
fn core_name(implementer: u32, part: u32) -> String {
    let core = match (implementer, part) {
        // Microsoft's Cobalt 100 is a Neoverse N2 with its own part number.
        (ARM, part) | (MICROSOFT, part @ 0xd49) => entry(&ARM_PARTS, part),
        (AMPERE, 0xac3 | 0xac4) => Some("AmpereOne"),
        (APPLE, part) => APPLE_PARTS.iter().find(|(parts, _)| parts.contains(&part)).map(|(_, name)| *name),
        _ => None,
    };
    let mut name = entry(&IMPLEMENTERS, implementer).map_or(format!("implementer {implementer:#04x}"), str::to_string);
    match core {
        Some(core) if core.starts_with(&name) => name = core.into(),
        Some(core) => write!(name, " {core}").unwrap_or(()),
        None => write!(name, " core, part {part:#05x}").unwrap_or(()),
    }
    name
}

fn entry(table: &[(u32, &'static str)], number: u32) -> Option<&'static str> {
    table.iter().find(|(known, _)| *known == number).map(|(_, name)| *name)
}

const ARM: u32 = 0x41;
const APPLE: u32 = 0x61;
const MICROSOFT: u32 = 0x6d;
const AMPERE: u32 = 0xc0;

const IMPLEMENTERS: [(u32, &str); 9] = [
    (ARM, "Arm"),
    (APPLE, "Apple"),
    (MICROSOFT, "Microsoft"),
    (AMPERE, "Ampere"),
    (0x46, "Fujitsu"),
    (0x48, "HiSilicon"),
    (0x4e, "NVIDIA"),
    (0x51, "Qualcomm"),
    (0x70, "Phytium"),
];

const ARM_PARTS: [(u32, &str); 16] = [
    (0xd03, "Cortex-A53"),
    (0xd05, "Cortex-A55"),
    (0xd07, "Cortex-A57"),
    (0xd08, "Cortex-A72"),
    (0xd0b, "Cortex-A76"),
    (0xd0c, "Neoverse N1"),
    (0xd40, "Neoverse V1"),
    (0xd41, "Cortex-A78"),
    (0xd42, "Cortex-A78AE"),
    (0xd49, "Neoverse N2"),
    (0xd4b, "Cortex-A78C"),
    (0xd4f, "Neoverse V2"),
    (0xd83, "Neoverse V3AE"),
    (0xd84, "Neoverse V3"),
    (0xd85, "Cortex-X925"),
    (0xd8e, "Neoverse N3"),
];

/// The part numbers of each chip, for both kinds of cores and including the Pro and Max variants. In a virtual machine
/// on macOS, the hypervisor reports part 0 instead.
const APPLE_PARTS: [(&[u32], &str); 4] = [
    (&[0x22, 0x23, 0x24, 0x25, 0x28, 0x29], "Apple M1"),
    (&[0x32, 0x33, 0x34, 0x35, 0x38, 0x39], "Apple M2"),
    (&[0x42, 0x43, 0x44, 0x45, 0x48, 0x49], "Apple M3"),
    (&[0x52, 0x53, 0x54, 0x55, 0x58, 0x59], "Apple M4"),
];

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a core's paragraph as Linux prints it on aarch64.
    fn core(number: u32, implementer: &str, part: &str) -> String {
        format!(
            "processor\t: {number}\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics \
             fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp\nCPU implementer\t: {implementer}\nCPU architecture: 8\n\
             CPU variant\t: 0x3\nCPU part\t: {part}\nCPU revision\t: 1\n\n"
        )
    }

    #[test]
    fn arm_cores_are_named() {
        for (implementer, part, name) in [
            ("0x41", "0xd0c", "Arm Neoverse N1"),
            ("0x41", "0xd40", "Arm Neoverse V1"),
            ("0x41", "0xd49", "Arm Neoverse N2"),
            ("0x41", "0xd4f", "Arm Neoverse V2"),
            ("0x41", "0xd84", "Arm Neoverse V3"),
            ("0x41", "0xd08", "Arm Cortex-A72"),
            ("0x41", "0xd0b", "Arm Cortex-A76"),
            ("0x41", "0xd41", "Arm Cortex-A78"),
            ("0x61", "0x023", "Apple M1"),
            ("0x61", "0x039", "Apple M2"),
            ("0x61", "0x045", "Apple M3"),
            ("0x61", "0x053", "Apple M4"),
            ("0xc0", "0xac3", "AmpereOne"),
            ("0xc0", "0xac4", "AmpereOne"),
            ("0x6d", "0xd49", "Microsoft Neoverse N2"),
        ] {
            let cpuinfo: String = (0..4).map(|number| core(number, implementer, part)).collect();
            assert_eq!(named(&cpuinfo).as_deref(), Some(name), "{implementer} {part}");
        }
    }

    #[test]
    fn unknown_arm_cores_are_numbered() {
        for (implementer, part, name) in [
            ("0x41", "0xfff", "Arm core, part 0xfff"),
            ("0x61", "0x000", "Apple core, part 0x000"),
            ("0x6d", "0xd4f", "Microsoft core, part 0xd4f"),
            ("0x03", "0x001", "implementer 0x03 core, part 0x001"),
        ] {
            assert_eq!(named(&core(0, implementer, part)).as_deref(), Some(name));
        }
    }

    #[test]
    fn kinds_of_core_are_counted() {
        let little = (0..4).map(|number| core(number, "0x41", "0xd05"));
        let big = (4..6).map(|number| core(number, "0x41", "0xd0b"));
        let cpuinfo: String = little.chain(big).chain(["Model\t: Some Board\n".to_string()]).collect();
        assert_eq!(named(&cpuinfo).as_deref(), Some("4 × Arm Cortex-A55, 2 × Arm Cortex-A76"));
    }

    #[test]
    fn x86_names_come_from_cpuinfo() {
        let core = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC 7763 64-Core Processor\n\n";
        assert_eq!(named(&core.repeat(2)).as_deref(), Some("AMD EPYC 7763 64-Core Processor"));
        assert_eq!(named("processor\t: 0\nisa\t: rv64imafdc\n"), None);
    }
}

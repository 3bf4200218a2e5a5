//! Describes the CPU that `bench ops` measures: its name, and the caches of one core.

use std::fs;
use std::path::Path;

/// Describes the CPU in one line, with the caches that the system reports:
/// `Intel(R) Xeon(R) Processor, L1 48 KiB, L2 2 MiB, L3 480 MiB (cores 0-1)`.
pub(super) fn described() -> String {
    let name = fs::read_to_string("/proc/cpuinfo").ok().and_then(|text| name(&text));
    let caches = caches(Path::new("/sys/devices/system/cpu/cpu0/cache"));
    [name.unwrap_or_else(|| "a processor without a name".into())]
        .into_iter()
        .chain(caches)
        .collect::<Vec<_>>()
        .join(", ")
}

fn name(cpuinfo: &str) -> Option<String> {
    let mut fields = cpuinfo.lines().filter_map(|line| line.split_once(':'));
    fields.find(|(field, _)| field.trim() == "model name").map(|(_, name)| name.trim().to_string())
}

/// Returns the data caches of one core, smallest first. A shared cache lists the cores that share it.
fn caches(folder: &Path) -> Vec<String> {
    let cache = |index: usize| {
        let read = |what: &str| fs::read_to_string(folder.join(format!("index{index}/{what}"))).ok();
        let (level, kind, size) = (read("level")?, read("type")?, read("size")?);
        let kib: u64 = size.trim().strip_suffix('K')?.parse().ok()?;
        let size = if kib.is_multiple_of(1024) { format!("{} MiB", kib / 1024) } else { format!("{kib} KiB") };
        let shared = read("shared_cpu_list").filter(|list| list.contains([',', '-']));
        let shared = shared.map_or(String::new(), |list| format!(" (cores {})", list.trim()));
        Some((kind, format!("L{} {size}{shared}", level.trim())))
    };
    (0..8).map_while(cache).filter(|(kind, _)| kind.trim() != "Instruction").map(|(_, cache)| cache).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_name_comes_from_the_first_core() {
        let text = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC\n\nprocessor\t: 1\nmodel name\t: another\n";
        assert_eq!(name(text).as_deref(), Some("AMD EPYC"));
        assert_eq!(name("processor\t: 0\n"), None);
    }

    #[test]
    fn data_caches_list_the_cores_that_share_them() {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |index: usize, fields: [(&str, &str); 4]| {
            let cache = folder.path().join(format!("index{index}"));
            fs::create_dir(&cache).expect("a folder");
            fields.iter().for_each(|(field, text)| fs::write(cache.join(field), text).expect("a file"));
        };
        write(0, [("level", "1\n"), ("type", "Data\n"), ("size", "48K\n"), ("shared_cpu_list", "0\n")]);
        write(1, [("level", "1\n"), ("type", "Instruction\n"), ("size", "32K\n"), ("shared_cpu_list", "0\n")]);
        write(2, [("level", "2\n"), ("type", "Unified\n"), ("size", "512K\n"), ("shared_cpu_list", "0\n")]);
        write(3, [("level", "3\n"), ("type", "Unified\n"), ("size", "32768K\n"), ("shared_cpu_list", "0-7\n")]);
        assert_eq!(caches(folder.path()), ["L1 48 KiB", "L2 512 KiB", "L3 32 MiB (cores 0-7)"]);
        assert!(caches(&folder.path().join("none")).is_empty());
    }
}

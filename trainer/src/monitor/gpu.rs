//! The GPUs of `machine_monitor`: reads the metrics of each visible GPU from NVIDIA's management library (NVML).
//!
//! The library is part of the driver and is opened at run time, so it is needed neither for builds nor on machines
//! without GPUs.

use std::collections::BTreeSet;

use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

use super::metric::{Metric, Scalar, gpu_metrics};

/// The monitored GPUs, at least one.
#[derive(Debug)]
pub(super) struct Gpus {
    nvml: Nvml,
    watched: Vec<Watched>,
}

#[derive(Debug)]
struct Watched {
    /// The index that `nvidia-smi` shows.
    index: u32,
    metrics: [&'static Metric; 4],
    /// Whether missing metrics of this GPU were already reported.
    has_failed: bool,
}

/// The reason why no GPU is monitored.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Absent {
    /// This machine has no GPU or no driver.
    None(String),
    /// NVML failed, so GPUs cannot be queried.
    Failed(String),
}

impl Gpus {
    /// Opens NVML and finds the GPUs that `CUDA_VISIBLE_DEVICES` permits. `visible` is the value of this variable. The
    /// call may take seconds.
    pub(super) fn find(visible: Option<&str>) -> Result<Self, Absent> {
        let nvml = Nvml::init().map_err(|error| match error {
            NvmlError::LibloadingError(error) => Absent::None(error.to_string()),
            NvmlError::DriverNotLoaded => Absent::None(error.to_string()),
            error => Absent::Failed(error.to_string()),
        })?;
        let failed = |error: NvmlError| Absent::Failed(error.to_string());
        let count = nvml.device_count().map_err(failed)?;
        // A GPU that does not answer gets an empty UUID. `CUDA_VISIBLE_DEVICES` can still select it by its index.
        let uuid = |index| nvml.device_by_index(index).and_then(|device| device.uuid()).unwrap_or_default();
        let uuids: Vec<String> = (0..count).map(uuid).collect();
        let indices = match visible {
            None => (0..count).collect(),
            Some(visible) => let_through(visible, &uuids),
        };
        if indices.is_empty() {
            let why = match (count, visible) {
                (1.., Some(visible)) => format!("CUDA_VISIBLE_DEVICES=\"{visible}\" hides all {count}"),
                _ => "the driver lists none".into(),
            };
            return Err(Absent::None(why));
        }
        let watched = indices
            .into_iter()
            .map(|index| Watched { index, metrics: gpu_metrics(index), has_failed: false })
            .collect();
        Ok(Self { nvml, watched })
    }

    /// Returns the current metrics of all GPUs. Omits metrics that cannot be read, and calls `say` once for each GPU
    /// with missing metrics.
    pub(super) fn sample(&mut self, mut say: impl FnMut(String)) -> Vec<Scalar> {
        let mut scalars = vec![];
        for gpu in &mut self.watched {
            let mut troubles = vec![];
            match self.nvml.device_by_index(gpu.index) {
                Ok(device) => {
                    for ((what, answer), metric) in ask(&device).into_iter().zip(gpu.metrics) {
                        match answer {
                            Ok(value) => scalars.push(Scalar { metric, value }),
                            Err(error) => troubles.push(format!("{what}: {error}")),
                        }
                    }
                }
                Err(error) => troubles.push(error.to_string()),
            }
            if !troubles.is_empty() && !std::mem::replace(&mut gpu.has_failed, true) {
                say(format!("`machine_monitor` cannot read all metrics of GPU {}: {}", gpu.index, troubles.join("; ")));
            }
        }
        scalars
    }
}

/// Returns the metrics in the order of [`gpu_metrics`].
fn ask(device: &Device) -> [(&'static str, Result<f64, NvmlError>); 4] {
    [
        ("utilization", device.utilization_rates().map(|rates| f64::from(rates.gpu))),
        ("memory", device.memory_info().map(|memory| memory.used as f64)),
        // NVML reports milliwatts.
        ("power", device.power_usage().map(|power| f64::from(power) / 1e3)),
        ("temperature", device.temperature(TemperatureSensor::Gpu).map(f64::from)),
    ]
}

/// Returns the devices that CUDA would use for this value of `CUDA_VISIBLE_DEVICES`. Each entry is an index or the
/// unique beginning of a UUID. CUDA ignores the first invalid entry and all entries after it. An entry for a part of a
/// GPU (`MIG-…`) counts as invalid.
fn let_through(visible: &str, uuids: &[String]) -> BTreeSet<u32> {
    let find = |entry: &str| {
        if let Ok(index) = entry.parse::<usize>() {
            return (index < uuids.len()).then_some(index);
        }
        let mut named =
            uuids.iter().enumerate().filter(|(_, uuid)| entry.starts_with("GPU-") && uuid.starts_with(entry));
        named.next().filter(|_| named.next().is_none()).map(|(index, _)| index)
    };
    visible.split(',').map_while(|entry| find(entry.trim())).map(|index| index as u32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_devices_are_read_as_cuda_reads_them() {
        let uuids = ["GPU-aa11", "GPU-aa22", "GPU-bb33"].map(String::from);
        for (visible, expected) in [
            ("", &[][..]),
            ("0,1,2", &[0, 1, 2]),
            (" 2 , 0 ", &[0, 2]),
            ("1,1", &[1]),
            // Entries after an invalid one are ignored.
            ("0,-1,2", &[0]),
            ("3", &[]),
            ("1,x,0", &[1]),
            ("GPU-bb,GPU-aa22", &[1, 2]),
            ("GPU-aa", &[]),
            ("GPU-cc", &[]),
            ("GPU", &[]),
            ("MIG-aa11,0", &[]),
            ("99999999999999999999", &[]),
        ] {
            assert_eq!(let_through(visible, &uuids).into_iter().collect::<Vec<_>>(), expected, "{visible}");
        }
    }
}

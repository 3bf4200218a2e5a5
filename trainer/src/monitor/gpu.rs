//! GPUs of `machine_monitor`: what NVIDIA's management library (NVML) says of each that the process may use.
//!
//! The library comes with the driver and is opened at run time, so a build needs nothing of it and a machine may lack it.

use std::collections::BTreeSet;

use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

use super::metric::{Metric, Scalar, gpu_metrics};

/// The GPUs that are watched; there is at least one.
#[derive(Debug)]
pub(super) struct Gpus {
    nvml: Nvml,
    watched: Vec<Watched>,
}

#[derive(Debug)]
struct Watched {
    /// As `nvidia-smi` counts.
    index: u32,
    metrics: [&'static Metric; 4],
    /// What it does not say was said.
    has_failed: bool,
}

/// Why no GPU is watched.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Absent {
    /// There is none here.
    None(String),
    /// There may be some, but nothing can be asked of them.
    Failed(String),
}

impl Gpus {
    /// Opens NVML, and finds those that `CUDA_VISIBLE_DEVICES`, whose value `visible` is, lets through. This may take seconds.
    pub(super) fn find(visible: Option<&str>) -> Result<Self, Absent> {
        let nvml = Nvml::init().map_err(|error| match error {
            NvmlError::LibloadingError(error) => Absent::None(error.to_string()),
            NvmlError::DriverNotLoaded => Absent::None(error.to_string()),
            error => Absent::Failed(error.to_string()),
        })?;
        let failed = |error: NvmlError| Absent::Failed(error.to_string());
        let count = nvml.device_count().map_err(failed)?;
        // One that does not answer has no name here; its number still finds it.
        let uuid = |index| nvml.device_by_index(index).and_then(|device| device.uuid()).unwrap_or_default();
        let uuids: Vec<String> = (0..count).map(uuid).collect();
        let indices = match visible {
            None => (0..count).collect(),
            Some(visible) => let_through(visible, &uuids),
        };
        if indices.is_empty() {
            let why = match (count, visible) {
                (1.., Some(visible)) => format!("CUDA_VISIBLE_DEVICES=\"{visible}\" lets through none of {count}"),
                _ => "the driver has none".into(),
            };
            return Err(Absent::None(why));
        }
        let watched = indices
            .into_iter()
            .map(|index| Watched { index, metrics: gpu_metrics(index), has_failed: false })
            .collect();
        Ok(Self { nvml, watched })
    }

    /// What they do now. What one of them does not say is left out, and `say` is told of it once for each GPU.
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
                say(format!("`machine_monitor` does not have all of GPU {}: {}", gpu.index, troubles.join("; ")));
            }
        }
        scalars
    }
}

/// In the order of [`gpu_metrics`].
fn ask(device: &Device) -> [(&'static str, Result<f64, NvmlError>); 4] {
    [
        ("utilization", device.utilization_rates().map(|rates| f64::from(rates.gpu))),
        ("memory", device.memory_info().map(|memory| memory.used as f64)),
        // In milliwatts.
        ("power", device.power_usage().map(|power| f64::from(power) / 1e3)),
        ("temperature", device.temperature(TemperatureSensor::Gpu).map(f64::from)),
    ]
}

/// The devices that CUDA would take of such a list: numbers, or the beginning of a UUID that only one has, up to the first that is neither.
/// A part of a GPU (`MIG-…`) is none.
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
    fn what_cuda_would_take() {
        let uuids = ["GPU-aa11", "GPU-aa22", "GPU-bb33"].map(String::from);
        for (visible, expected) in [
            ("", &[][..]),
            ("0,1,2", &[0, 1, 2]),
            (" 2 , 0 ", &[0, 2]),
            ("1,1", &[1]),
            // What is behind a wrong one does not count.
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

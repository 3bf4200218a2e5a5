//! The `VarBuilder` backend that builds any candle module in no memory and writes down its parameters.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::Init;
use candle_nn::var_builder::SimpleBackend;

use crate::parameter::{Parameter, ParameterId};

/// What building has written down so far. Order is the order of construction.
#[derive(Default)]
pub(crate) struct Record {
    pub(crate) parameters: Vec<Parameter>,
    /// Parameters that each layer asked for, its own and tied ones.
    pub(crate) uses: Vec<Vec<ParameterId>>,
    by_name: HashMap<String, ParameterId>,
    /// User name to owner name.
    owners: HashMap<String, String>,
    used_ties: Vec<String>,
}

impl Record {
    pub(crate) fn new(ties: &[(String, String)]) -> Self {
        let owners = ties.iter().map(|(owner, user)| (user.clone(), owner.clone())).collect();
        Self { owners, ..Self::default() }
    }

    pub(crate) fn begin_layer(&mut self) {
        self.uses.push(vec![]);
    }

    /// Ties whose user no layer asked for.
    pub(crate) fn unused_ties<'a>(&self, ties: &'a [(String, String)]) -> Option<&'a (String, String)> {
        ties.iter().find(|(_, user)| !self.used_ties.contains(user))
    }

    fn get(&mut self, shape: Shape, name: &str, init: Init, dtype: DType) -> Result<Tensor> {
        let owner = self.owners.get(name).cloned();
        if let Some(owner) = &owner {
            self.used_ties.push(name.to_string());
            if !self.by_name.contains_key(owner) {
                candle_core::bail!("`{name}` is tied to `{owner}`, which no earlier layer has");
            }
        }
        let id = match self.by_name.get(owner.as_deref().unwrap_or(name)) {
            Some(&id) => {
                let known = &self.parameters[id];
                if *known.shape() != shape || known.dtype() != dtype {
                    candle_core::bail!(
                        "`{name}` wants {shape:?} {dtype:?}, but `{}` is {:?} {:?}",
                        known.name(),
                        known.shape(),
                        known.dtype()
                    );
                }
                id
            }
            None => {
                let id = self.parameters.len();
                let layer = self.uses.len() - 1;
                self.parameters.push(Parameter::new(name.to_string(), shape, dtype, init, layer)?);
                self.by_name.insert(name.to_string(), id);
                id
            }
        };
        if let Some(uses) = self.uses.last_mut()
            && !uses.contains(&id)
        {
            uses.push(id);
        }
        Ok(self.parameters[id].leaf().clone())
    }
}

/// Shares the record between the builder of each layer and the one who builds.
#[derive(Clone)]
pub(crate) struct Recorder(pub(crate) Arc<Mutex<Record>>);

impl SimpleBackend for Recorder {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, _: &Device) -> Result<Tensor> {
        let mut record = self.0.lock().map_err(|_| candle_core::Error::Msg("building a layer panicked".into()))?;
        record.get(shape, name, init, dtype)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        candle_core::bail!("parameter `{name}` is asked for without a shape; use `VarBuilder::get`")
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.lock().is_ok_and(|record| record.by_name.contains_key(name))
    }
}

//! `csv_monitor`: one file a tag, `Train_Samples_train_loss.csv` with the header `step,train_loss`.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::PathBuf;

use super::Scalar;
use crate::error::Error;

#[derive(Debug)]
pub(super) struct Writer {
    folder: PathBuf,
    files: BTreeMap<&'static str, File>,
}

impl Writer {
    pub(super) fn open(folder: PathBuf) -> Result<Self, Error> {
        fs::create_dir_all(&folder).map_err(Error::io(&folder))?;
        Ok(Self { folder, files: BTreeMap::new() })
    }

    pub(super) fn write(&mut self, scalars: &[Scalar]) -> Result<(), Error> {
        for scalar in scalars {
            let path = self.folder.join(format!("{}.csv", scalar.tag.replace('/', "_")));
            let file = match self.files.entry(scalar.tag) {
                std::collections::btree_map::Entry::Occupied(entry) => entry.into_mut(),
                std::collections::btree_map::Entry::Vacant(entry) => {
                    // A resumed run goes on in the same file.
                    let is_new = !path.exists();
                    let mut file =
                        OpenOptions::new().create(true).append(true).open(&path).map_err(Error::io(&path))?;
                    if is_new {
                        let name = scalar.tag.rsplit('/').next().unwrap_or(scalar.tag);
                        writeln!(file, "step,{name}").map_err(Error::io(&path))?;
                    }
                    entry.insert(file)
                }
            };
            writeln!(file, "{},{}", scalar.samples, scalar.value).map_err(Error::io(&path))?;
        }
        Ok(())
    }
}

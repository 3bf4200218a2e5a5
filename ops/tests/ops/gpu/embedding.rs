//! Embeddings are bit-identical to the CPU. They report the same errors, but only in a later operation.

use super::{EVERYWHERE, FLOATS, both, gpu, on_host};
use crate::check::{bits, floats, ids, normal, same_bits};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::Module;
use zero_ops::device::check;
use zero_ops::{Embedding, cross_entropy};

fn look_up(table: &Tensor, ids: &Tensor) -> Result<Tensor> {
    Embedding::from_tensor(table.clone()).forward(&ids.to_device(table.device())?)
}

#[test]
fn rows_and_gradients_are_bit_identical_to_the_cpus() {
    let Some(gpu) = gpu() else { return };
    for dtype in FLOATS {
        let table = [normal("table", &[200, 9]).to_dtype(dtype).unwrap()];
        // Some rows of the table never occur, some occur often. The longest input has more indices than are sorted at
        // once.
        let mut of = vec![ids("some", &[2, 30], 20), ids("one", &[17], 1)];
        if dtype == DType::F32 {
            of.push(ids("many", &[2100], 200));
            of.extend([DType::I64, DType::U8].map(|dtype| ids("others", &[2, 50], 200).to_dtype(dtype).unwrap()));
        }
        for ids in &of {
            for into in EVERYWHERE {
                let [got, want] = both(&gpu, &table, into, |t| look_up(&t[0], ids));
                same_bits("rows", &got.0, &want.0);
                same_bits(&format!("gradient of {dtype:?} into {into:?}"), &got.1[0], &want.1[0]);
            }
        }
        // Looks up views: positions that are the same for every sample, and a part of a larger tensor.
        let view = |t: &Tensor| -> Result<Tensor> {
            let device = t.device();
            let positions = Tensor::arange(0u32, 11, device)?.broadcast_as((3, 11))?;
            let part = ids("part", &[40], 200).to_device(device)?.narrow(0, 7, 33)?.reshape((3, 11))?;
            Embedding::from_tensor(t.clone()).forward(&positions)? + Embedding::from_tensor(t.clone()).forward(&part)?
        };
        for into in EVERYWHERE {
            let [got, want] = both(&gpu, &table, into, |t| view(&t[0]));
            same_bits("rows of views", &got.0, &want.0);
            same_bits("gradient of views", &got.1[0], &want.1[0]);
        }
    }
}

#[test]
fn an_index_out_of_range_is_nan_and_an_error_later() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let table = normal("table", &[5, 3]);
    let of_gpu = table.to_device(&gpu)?;
    for (values, says) in [([4i64, -1, 70], "index -1 at position 1"), ([0, 1, 5], "index 5 at position 2")] {
        let ids = Tensor::new(&values, &Device::Cpu)?;
        let said = look_up(&table, &ids).expect_err("an error").to_string();
        assert!(said.contains(&format!("embedding: {says} is not below 5")), "{said}");

        let y = on_host(&look_up(&of_gpu, &ids)?);
        for (row, id) in floats(&y).chunks(3).zip(values) {
            match table.get(id.try_into().unwrap_or(usize::MAX)) {
                Ok(of_table) => assert_eq!(row.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), bits(&of_table)),
                Err(_) => assert!(row.iter().all(|x| x.is_nan())),
            }
        }
        // The values have been copied to the host, so the GPU has recorded the error too. The next operation reports
        // it, once.
        let good = Tensor::new(&[1u32], &Device::Cpu)?;
        let late = look_up(&of_gpu, &good).expect_err("an error").to_string();
        assert!(
            late.contains(&format!("embedding: {says} is not below 5 (in an earlier operation on the GPU")),
            "{late}"
        );
        check(&gpu)?;
        look_up(&of_gpu, &good)?;

        look_up(&of_gpu, &ids)?;
        let late = check(&gpu).expect_err("an error").to_string();
        assert!(late.contains(&format!("embedding: {says}")), "{late}");
    }
    // Each candle device has its own record of errors.
    let another = zero_ops::device::open(0)?;
    look_up(&of_gpu, &Tensor::new(&[9u32], &Device::Cpu)?)?;
    check(&another)?;
    check(&Device::Cpu)?;
    assert!(check(&gpu).is_err());

    let wrong = cross_entropy(&of_gpu, &Tensor::new(&[0f32; 5], &gpu)?).expect_err("an error").to_string();
    assert!(wrong.contains("cross-entropy: expected indices of dtype u32, i64 or u8, got"), "{wrong}");
    Ok(())
}

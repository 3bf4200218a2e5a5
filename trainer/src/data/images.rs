//! Images in a folder with one subfolder per class.

use std::fs;
use std::io::Cursor;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use image::imageops::FilterType;
use image::{ImageFormat, ImageReader};
use rayon::prelude::*;
use zero_engine::{Batch, DataError};

use super::dataset::{BoxError, Dataset};

/// File name extensions of images.
const EXTENSIONS: [&str; 7] = ["jpg", "jpeg", "png", "ppm", "pgm", "bmp", "webp"];

/// Images with their classes, in the layout of torchvision's `ImageFolder`. The classes are the subfolders, sorted by
/// name. The images of a class are the files in its subfolder, sorted by name, followed by the files in nested
/// subfolders.
///
/// A batch reads its images in parallel when it is loaded. An image is converted to RGB, scaled to the size of the data
/// set (bilinear, with antialiasing as in Pillow), and divided by 255. Scaling does not keep the aspect ratio.
///
/// ```no_run
/// use zero_train::data::{images, split};
///
/// // ImageNet's mean and standard deviation of each channel.
/// let images = images("photos", [224, 224])?.normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]);
/// println!("{:?}", images.classes());
/// # Ok::<(), zero_train::data::DataError>(())
/// ```
#[derive(Debug, Clone)]
pub struct ImageFolder {
    classes: Vec<String>,
    /// The files, each with the index of its class.
    files: Vec<(PathBuf, u32)>,
    height: u32,
    width: u32,
    mean: [f32; 3],
    std: [f32; 3],
}

/// Opens the images in `folder`, whose subfolders are classes. The images are scaled to `[height, width]` pixels.
///
/// # Errors
/// Fails if the folder cannot be read, has no subfolder, or has a class without an image.
pub fn images(folder: impl AsRef<Path>, [height, width]: [u32; 2]) -> Result<ImageFolder, DataError> {
    let folder = folder.as_ref();
    let (mut classes, mut files) = (vec![], vec![]);
    for class in entries(folder)?.into_iter().filter(|path| path.is_dir()) {
        let first = files.len();
        collect(&class, classes.len() as u32, &mut files)?;
        if files.len() == first {
            let message =
                format!("the folder of this class has no images; image file names end in {}", EXTENSIONS.join(", "));
            return Err(DataError::Image { path: class, message });
        }
        classes.push(class.file_name().unwrap_or_default().to_string_lossy().into_owned());
    }
    if classes.is_empty() {
        let message = "the folder has no subfolders; each class needs a subfolder with its images".into();
        return Err(DataError::Image { path: folder.into(), message });
    }
    Ok(ImageFolder { classes, files, height: height.max(1), width: width.max(1), mean: [0.0; 3], std: [1.0; 3] })
}

impl ImageFolder {
    /// Returns the names of the classes. A target is an index into this list.
    #[must_use]
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// Returns the same images with `mean` subtracted from each channel, and the difference divided by `std`.
    #[must_use]
    pub fn normalize(self, mean: [f32; 3], std: [f32; 3]) -> Self {
        Self { mean, std, ..self }
    }

    /// Reads an image. Returns the red values of all pixels, row by row, then the green values, then the blue values.
    fn read(&self, path: &Path) -> Result<Vec<f32>, DataError> {
        let failed = |message: String| DataError::Image { path: path.into(), message };
        let bytes = fs::read(path).map_err(DataError::io(path))?;
        let mut reader = ImageReader::new(Cursor::new(&bytes));
        // The name determines the format only if the content is not recognized.
        if let Ok(format) = ImageFormat::from_path(path) {
            reader.set_format(format);
        }
        let reader = reader.with_guessed_format().map_err(DataError::io(path))?;
        // The decoder fills the missing part of a truncated JPEG with gray.
        if reader.format() == Some(ImageFormat::Jpeg) && !has_jpeg_end(&bytes) {
            return Err(failed("the JPEG file is truncated: it has no end-of-image marker".into()));
        }
        let image = reader.decode().map_err(|error| failed(error.to_string()))?.into_rgb8();
        if image.is_empty() {
            return Err(failed("the image has no pixels".into()));
        }
        let (width, height) = (self.width, self.height);
        let image = match image.dimensions() == (width, height) {
            true => image,
            false => image::imageops::resize(&image, width, height, FilterType::Triangle),
        };
        let channel = |channel: usize| {
            let (mean, std) = (self.mean[channel], self.std[channel]);
            image.pixels().map(move |pixel| (f32::from(pixel.0[channel]) / 255.0 - mean) / std)
        };
        Ok((0..3).flat_map(channel).collect())
    }
}

impl Dataset for ImageFolder {
    fn len(&self) -> usize {
        self.files.len()
    }

    /// Returns images `[rows, 3, height, width]` in f32, and the class of each image in u32.
    fn batch(&self, indices: &[usize]) -> Result<Batch, BoxError> {
        let file = |&index: &usize| {
            let samples = self.files.len();
            self.files.get(index).ok_or(DataError::Index { index, samples })
        };
        let files = indices.iter().map(file).collect::<Result<Vec<_>, _>>()?;
        let images = files.par_iter().map(|(path, _)| self.read(path)).collect::<Result<Vec<_>, _>>()?;
        let shape = (indices.len(), 3, self.height as usize, self.width as usize);
        let classes: Vec<u32> = files.iter().map(|(_, class)| *class).collect();
        Ok(Batch::new(
            Tensor::from_vec(images.concat(), shape, &Device::Cpu)?,
            Tensor::from_vec(classes, indices.len(), &Device::Cpu)?,
        ))
    }
}

/// Returns whether a JPEG file has an end-of-image marker. Skips the segments by their lengths, because the metadata
/// may contain another JPEG image.
fn has_jpeg_end(bytes: &[u8]) -> bool {
    let mut at = 0;
    loop {
        // Compressed data has `FF 00` for a byte FF, and restart markers, D0 to D7. A marker may follow several bytes
        // FF.
        let is_marker = |pair: &[u8]| pair[0] == 0xff && !matches!(pair[1], 0 | 0xd0..=0xd7 | 0xff);
        let Some(found) = bytes[at..].windows(2).position(is_marker) else { return false };
        at += found + 2;
        match bytes[at - 1] {
            0xd9 => return true,
            // Markers without a segment.
            0x01 | 0xd8 => {}
            _ => match bytes.get(at..).and_then(|rest| rest.first_chunk()) {
                Some(length) => at += usize::from(u16::from_be_bytes(*length)),
                None => return false,
            },
        }
        if at > bytes.len() {
            return false;
        }
    }
}

/// Returns the paths in a folder, sorted.
fn entries(folder: &Path) -> Result<Vec<PathBuf>, DataError> {
    let failed = DataError::io(folder);
    let entries = fs::read_dir(folder).and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect());
    let mut paths: Vec<PathBuf> = entries.map_err(failed)?;
    paths.sort();
    Ok(paths)
}

/// Adds the images in a folder, and then the images in its subfolders.
fn collect(folder: &Path, class: u32, files: &mut Vec<(PathBuf, u32)>) -> Result<(), DataError> {
    let (folders, others): (Vec<PathBuf>, Vec<PathBuf>) = entries(folder)?.into_iter().partition(|path| path.is_dir());
    let end = |path: &Path| path.extension().and_then(|end| end.to_str()).unwrap_or_default().to_ascii_lowercase();
    let is_image = |path: &PathBuf| EXTENSIONS.contains(&end(path).as_str());
    files.extend(others.into_iter().filter(is_image).map(|path| (path, class)));
    folders.iter().try_for_each(|folder| collect(folder, class, files))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::python::python;
    use image::RgbImage;

    fn image(width: u32, height: u32, seed: u32) -> RgbImage {
        RgbImage::from_fn(width, height, |x, y| {
            let value = |channel: u32| ((x * (3 + channel) + y * 7 + seed * 31) % 256) as u8;
            image::Rgb([value(0), value(1), value(2)])
        })
    }

    fn folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (seed, (name, size)) in [
            ("dog/b.png", (8, 6)),
            ("dog/a.PNG", (8, 6)),
            ("dog/more/c.ppm", (20, 30)),
            ("cat/z.jpg", (33, 17)),
            ("cat/y.bmp", (5, 4)),
        ]
        .into_iter()
        .enumerate()
        {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let image = image(size.0, size.1, seed as u32);
            match name.ends_with("ppm") {
                // For this file name extension, the library would write a newer format, which Pillow does not read.
                true => fs::write(path, [format!("P6 {} {} 255\n", size.0, size.1).as_bytes(), &image].concat()),
                false => image.save(path).map_err(std::io::Error::other),
            }
            .unwrap();
        }
        fs::write(folder.path().join("dog/notes.txt"), "no image").unwrap();
        folder
    }

    #[test]
    fn classes_are_subfolders_and_pixels_are_channels_first() {
        let folder = folder();
        let data = images(folder.path(), [6, 8]).unwrap();
        assert_eq!((data.classes(), data.len()), (&["cat".to_string(), "dog".to_string()][..], 5));
        let batch = data.batch(&[3, 0]).unwrap();
        assert_eq!(batch.only_target().unwrap().to_vec1::<u32>().unwrap(), [1, 0]);
        let pixels = batch.inputs.single().unwrap();
        assert_eq!(pixels.dims(), [2, 3, 6, 8]);
        // Image 3 is dog/b.png, after two cats and dog/a.PNG: 5 · 5 + 4 · 7 in the blue channel.
        let first = pixels.get(0).unwrap().to_vec3::<f32>().unwrap();
        let (x, y, channel) = (5, 4, 2);
        assert_eq!(first[channel][y][x], 53.0 / 255.0);
        let normalized = data.clone().normalize([0.5; 3], [0.25; 3]).batch(&[3]).unwrap();
        let normalized = normalized.inputs.single().unwrap().get(0).unwrap().to_vec3::<f32>().unwrap();
        assert_eq!(normalized[channel][y][x], (first[channel][y][x] - 0.5) / 0.25);
        assert!(data.batch(&[5]).is_err());
    }

    #[test]
    fn damaged_and_missing_images_are_errors_with_their_path() {
        let folder = folder();
        let path = folder.path().join("dog/b.png");
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
        let error = images(folder.path(), [6, 8]).unwrap().batch(&[3]).unwrap_err().to_string();
        assert!(error.contains("dog/b.png: "), "{error}");
        // A JPEG image with a thumbnail in its metadata, truncated to every shorter length.
        let path = folder.path().join("cat/z.jpg");
        let bytes = fs::read(&path).unwrap();
        let thumbnail = [&[0xff, 0xe1][..], &(bytes.len() as u16 + 2).to_be_bytes()[..], &bytes].concat();
        let bytes = [&bytes[..2], &thumbnail, &bytes[2..]].concat();
        fs::write(&path, &bytes).unwrap();
        images(folder.path(), [6, 8]).unwrap().batch(&[1]).unwrap();
        for length in 0..bytes.len() {
            fs::write(&path, &bytes[..length]).unwrap();
            images(folder.path(), [6, 8]).unwrap().batch(&[1]).unwrap_err();
        }
        fs::write(&path, "P6 0 0 255\n").unwrap();
        let error = images(folder.path(), [6, 8]).unwrap().batch(&[1]).unwrap_err().to_string();
        assert!(error.contains("cat/z.jpg: the image has no pixels"), "{error}");
        fs::create_dir(folder.path().join("empty")).unwrap();
        let error = images(folder.path(), [6, 8]).unwrap_err().to_string();
        assert!(error.contains("empty: the folder of this class has no images"), "{error}");
        let error = images(folder.path().join("cat"), [6, 8]).unwrap_err().to_string();
        assert!(error.contains("cat: the folder has no subfolders"), "{error}");
    }

    /// Without scaling, the pixels are equal to torchvision's. With scaling or JPEG, they differ from torchvision's by
    /// at most 2 of 255 levels.
    #[test]
    fn images_agree_with_torchvision() {
        let folder = folder();
        for (size, tolerance) in [([6, 8], 2.0), ([24, 12], 2.0)] {
            let script = format!(
                "from torchvision.datasets import ImageFolder\nfrom torchvision import transforms as t\nimport json\n\
                 data = ImageFolder({:?}, t.Compose([t.Resize({size:?}), t.ToTensor()]))\n\
                 print(json.dumps([data.classes, [[int(c), x.flatten().tolist()] for x, c in data]]))",
                folder.path()
            );
            let Some(expected) = python(&["torchvision"], &script) else { return };
            let expected: serde_json::Value = serde_json::from_str(&expected).unwrap();
            let data = images(folder.path(), size).unwrap();
            assert_eq!(expected[0], serde_json::json!(data.classes()));
            for (index, sample) in expected[1].as_array().unwrap().iter().enumerate() {
                let batch = data.batch(&[index]).unwrap();
                assert_eq!(sample[0], batch.only_target().unwrap().to_vec1::<u32>().unwrap()[0], "{index}");
                let pixels = batch.inputs.single().unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
                let theirs = sample[1].as_array().unwrap().iter().map(|value| value.as_f64().unwrap() as f32);
                assert_eq!(theirs.len(), pixels.len());
                let is_exact = size == [6, 8] && matches!(index, 2 | 3);
                let tolerance = if is_exact { 0.0 } else { tolerance / 255.0 + 1e-6 };
                let largest = pixels.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(largest <= tolerance, "image {index} at {size:?}: {largest}");
            }
        }
    }
}

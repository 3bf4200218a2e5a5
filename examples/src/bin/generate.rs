//! Generates text from a run of `zero-train`, such as the quickstart's, or from a folder in Hugging Face's format.
//!
//! ```sh
//! cargo run --release -p zero-examples --bin generate -- runs/quickstart "Once upon a time"
//! ```

use zero_train::generate::{Generate, Generator, Sampling};

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (Some(folder), Some(prompt)) = (arguments.next(), arguments.next()) else {
        anyhow::bail!("usage: generate FOLDER PROMPT");
    };

    let generator = Generator::open(folder, None)?;
    let options = Generate { sampling: Sampling { temperature: 0.8, ..Sampling::default() }, ..Generate::default() };
    let prompt = generator.encode(&prompt)?; // or encode_chat(&[("user", "…")])
    let all = generator.generate(&[prompt], &options, |_, text| print!("{text}"))?;
    println!("\n{} tokens", all[0].tokens.len());
    Ok(())
}

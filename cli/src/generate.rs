//! `zero-train generate`: continues prompts with a trained model. It works on the terminal or on files.

use std::fs::{self, File};
use std::io::{self, ErrorKind, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use zero_engine::counted;
use zero_train::data::{At, PlacedRecord, Tokenizer, read_records};
use zero_train::generate::{Finish, Generate, Generated, Generator, Sampling, check_prompts};
use zero_train::{Error, process};

use crate::arguments::{GenerateArgs, refuse};
use crate::input::is_standard_input;
use crate::printed::{show, tell};

/// Generates a text for each prompt. Returns the exit status.
///
/// # Errors
/// Fails if the model or the prompts cannot be read, or if the model does not support an option.
pub(crate) fn generate(args: &GenerateArgs) -> anyhow::Result<u8> {
    let threads = args.threads.map_or_else(|| process::threads(None, 1), |threads| threads as usize);
    process::prepare(threads, 1)?;
    zero_train::ops::set_threads(threads);
    let options = options(args);
    options.sampling.check()?;
    if let Some(path) = output(args) {
        check_output(path)?;
    }
    let tokenizer = args.tokenizer.as_deref().map(tokenizer).transpose()?;
    let (records, path) = records(args)?;
    check_prompts(&records, path, &args.folder, tokenizer.as_ref())?;
    let generator = open(args, tokenizer)?;
    let prompts = generator.encode_records(records.clone(), path)?;
    if args.input.is_some() || args.output.is_some() {
        return to_file(args, &generator, &options, records, &prompts);
    }
    for (index, prompt) in prompts.iter().enumerate() {
        if prompts.len() > 1 {
            let gap = if index > 0 { "\n" } else { "" };
            show(&format!("{gap}[{}] {}\n", index + 1, args.prompt[index].trim_end()));
        }
        let started = Instant::now();
        let all = generator.generate(std::slice::from_ref(prompt), &options, |_, text| {
            show(text);
            let _ = io::stdout().flush();
        })?;
        show("\n");
        report(args, &all, started.elapsed());
    }
    Ok(0)
}

fn tokenizer(path: &Path) -> Result<Tokenizer, Error> {
    let wanted = "give the path of the model's tokenizer.json";
    Tokenizer::from_file(path).map_err(|error| Error::from(error).named("--tokenizer", wanted))
}

fn open(args: &GenerateArgs, tokenizer: Option<Tokenizer>) -> Result<Generator, Error> {
    let mut generator = Generator::open(&args.folder, args.adapter.as_deref())?;
    for warning in generator.warnings() {
        tell(&warning.to_string());
    }
    if let Some(tokenizer) = tokenizer {
        generator = generator.with_tokenizer(tokenizer)?;
    }
    Ok(match &args.chat_template {
        Some(template) => generator.with_chat_template(template),
        None => generator,
    })
}

fn options(args: &GenerateArgs) -> Generate {
    Generate {
        max_new_tokens: args.max_new_tokens,
        sampling: Sampling {
            temperature: args.temperature,
            top_k: args.top_k,
            top_p: args.top_p,
            min_p: args.min_p,
            repetition_penalty: args.repetition_penalty,
        },
        seed: args.seed,
        stop: args.stop.clone(),
        ignore_eos: args.ignore_eos,
        batch: args.batch as usize,
    }
}

/// Returns a record for each prompt, and the source of the prompts.
fn records(args: &GenerateArgs) -> Result<(Vec<PlacedRecord>, &Path), Error> {
    if let Some(path) = &args.input {
        let path: &Path = if is_standard_input(path) { "/dev/stdin".as_ref() } else { path };
        let records = read_records(path).map_err(|error| {
            Error::from(error).named("--input", "give a JSON Lines file whose records have `prompt` or `messages`")
        })?;
        return Ok((records, path));
    }
    let (texts, origin) = match &args.prompt_file {
        Some(path) if !is_standard_input(path) => {
            let text = fs::read_to_string(path)
                .map_err(|error| Error::io(path)(error).named("--prompt-file", "give a text file"))?;
            (vec![without_line_break(text)], path.as_path())
        }
        Some(_) => (vec![standard_input()?], "standard input".as_ref()),
        None if !args.prompt.is_empty() => (args.prompt.clone(), "--prompt".as_ref()),
        None if io::stdin().is_terminal() => refuse("--prompt <TEXT> is missing"),
        None => (vec![standard_input()?], "standard input".as_ref()),
    };
    let record = |text: String| {
        let system = args.system.iter().map(|text| json!({"role": "system", "content": text}));
        let (name, value) = match args.chat {
            true => ("messages", system.chain([json!({"role": "user", "content": text})]).collect()),
            false => ("prompt", text.into()),
        };
        Map::from_iter([(name.to_string(), value)])
    };
    let numbered = texts.into_iter().zip(1..).map(|(text, number)| (At::Record(number), record(text)));
    Ok((numbered.collect(), origin))
}

fn standard_input() -> Result<String, Error> {
    let mut text = String::new();
    io::stdin().read_to_string(&mut text).map_err(Error::io("standard input"))?;
    Ok(without_line_break(text))
}

/// Removes the line break at the end, which editors and `echo` add.
fn without_line_break(mut text: String) -> String {
    if text.ends_with('\n') {
        text.pop();
    }
    if text.ends_with('\r') {
        text.pop();
    }
    text
}

/// Returns the file to write, or `None` for standard output.
fn output(args: &GenerateArgs) -> Option<&Path> {
    args.output.as_deref().filter(|path| !is_standard_input(path))
}

/// Checks, before the texts are generated, that `path` is not a folder and that its parent folder exists.
fn check_output(path: &Path) -> Result<(), Error> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let kind = match (path.is_dir(), folder.is_dir()) {
        (true, _) => ErrorKind::IsADirectory,
        (false, false) => ErrorKind::NotFound,
        (false, true) => return Ok(()),
    };
    Err(unwritable(path, kind.into()))
}

fn unwritable(path: &Path, error: io::Error) -> Error {
    Error::io(path)(error).named("--output", "give the path of a writable file")
}

/// Writes one JSON object per prompt to a file, or to standard output, as soon as its text is complete. The file has
/// the suffix `.partial` until all texts are complete.
fn to_file(
    args: &GenerateArgs,
    generator: &Generator,
    options: &Generate,
    records: Vec<PlacedRecord>,
    prompts: &[Vec<u32>],
) -> anyhow::Result<u8> {
    let started = Instant::now();
    let mut partial = match output(args) {
        None => None,
        Some(path) => {
            let name = PathBuf::from(format!("{}.partial", path.display()));
            let file = File::create(&name).map_err(|error| unwritable(&name, error))?;
            Some((path, name, file))
        }
    };
    let (mut all, mut records) = (Vec::with_capacity(prompts.len()), records.into_iter());
    generator.generate_each(
        prompts,
        options,
        |_, _| {},
        |generated| {
            let record = records.next().map(|(_, record)| record).unwrap_or_default();
            let line = line(record, &generated);
            match &mut partial {
                Some((_, name, file)) => file.write_all(line.as_bytes()).map_err(|error| unwritable(name, error))?,
                None => {
                    show(&line);
                    let _ = io::stdout().flush();
                }
            }
            all.push(generated);
            Ok(())
        },
    )?;
    if let Some((path, name, file)) = partial {
        file.sync_all().and_then(|()| fs::rename(&name, path)).map_err(|error| unwritable(path, error))?;
    }
    report(args, &all, started.elapsed());
    Ok(0)
}

fn line(mut record: Map<String, Value>, generated: &Generated) -> String {
    let Generated { text, tokens, prompt_tokens, finish } = generated;
    record.insert("text".into(), text.as_str().into());
    record.insert("tokens".into(), tokens.clone().into());
    record.insert("prompt_tokens".into(), (*prompt_tokens).into());
    let reason = match finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
    };
    record.insert("finish_reason".into(), reason.into());
    format!("{}\n", Value::Object(record))
}

/// Prints the number of tokens and the time.
fn report(args: &GenerateArgs, all: &[Generated], taken: Duration) {
    if args.quiet {
        return;
    }
    let (prompt, new) = (|each: &Generated| each.prompt_tokens, |each: &Generated| each.tokens.len());
    let (prompt, new): (usize, usize) = (all.iter().map(prompt).sum(), all.iter().map(new).sum());
    let seconds = taken.as_secs_f64();
    tell(&format!(
        "generated {} from {} in {seconds:.2} s: {:.1} tokens/s",
        counted(new, "token", "tokens"),
        counted(prompt, "prompt token", "prompt tokens"),
        new as f64 / seconds.max(1e-9)
    ));
}

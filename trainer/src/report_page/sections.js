// The sections of the page. Each function fills an empty element from the runs, for a width in pixels.

const object = value => (value && typeof value === "object" && !Array.isArray(value) ? value : {});
const list = value => (Array.isArray(value) ? value : []);
const words = key => key.replaceAll("_", " ");

// Gives each run its look, and defaults to what is missing.
function read(raw) {
  const data = object(raw);
  const runs = list(data.runs).map((run, index) => ({ ...run, report: object(run.report), hasReport: run.report !== null, totals: object(run.totals),
    curves: object(run.curves), overlap: list(run.overlap), look: `run-${index % 6} dash-${Math.floor(index / 6) % 4}`, color: `run-${index % 6}` }));
  return { program: data.program ?? "", differences: list(data.differences), runs, isOne: runs.length === 1 };
}

function stateOf({ finished }) {
  if (typeof finished !== "string") return "not finished";
  return finished === "done" ? "finished" : `stopped by ${finished}`;
}

function placeOf({ report, hasReport }) {
  if (!hasReport) return "";
  const { world_size: ranks, zero_stage: stage, transport, instruction_set: isa, parameters } = report;
  const parts = [known(ranks) ? plural(ranks, "rank", "ranks") : "", known(stage) ? `ZeRO stage ${stage}` : "", transport, isa, known(parameters) ? `${parameters.toLocaleString("en")} parameters` : ""];
  return parts.filter(part => typeof part === "string" && part).join(" · ");
}

const evaluation = ({ lowest_eval_loss: loss, lowest_eval_step: step }) => (known(loss) ? `${digits(loss, 5)} at step ${step.toLocaleString("en")}` : "");

function result(body, { runs, isOne }) {
  const warn = (which, before, after) => {
    const told = runs.filter(which).map(run => run.name);
    if (told.length > 0) body.append(paragraph(isOne ? `The run ${before}. ${after}` : `${before.replace(/^./, first => first.toUpperCase())}: ${told.join(", ")}. ${after}`, "warning"));
  };
  warn(run => stateOf(run) === "not finished", "has not finished", "A run that has not finished is still training, or it ended with an error. This page shows the steps so far.");
  warn(run => run.is_report_old, "was resumed after report.json was written", "Figures from that file describe the run before it was resumed.");
  if (!isOne) {
    const rows = runs.map(run => [run.name, stateOf(run), run.totals.steps.toLocaleString("en"), digits(run.totals.last_loss, 5), evaluation(run.totals) || DASH,
      digits(run.totals.median_tokens_per_s, 4), amount(run.totals.peak_bytes, "B"), duration(run.totals.step_seconds)]);
    body.append(figures("Runs", ["Run", "State", "Steps", "Last loss", "Lowest evaluation loss", "Tokens/s (median)", "Peak memory of a rank", "Time in steps"], rows));
    return;
  }
  const [{ totals, report, folder }] = runs, restarts = list(report.restarts);
  const steps = [plural(totals.steps, "step", "steps"), totals.skipped_steps > 0 ? `${totals.skipped_steps.toLocaleString("en")} skipped` : "",
    totals.not_finite_steps > 0 ? `${totals.not_finite_steps.toLocaleString("en")} with a loss that is not finite` : ""];
  const loss = totals.steps > 0 ? `${digits(totals.first_loss, 5)} at the first step, ${digits(totals.last_loss, 5)} at the last` : "";
  body.append(facts([
    ["State", stateOf(runs[0])],
    ["Steps", steps.filter(Boolean).join(", ")],
    ["Loss", loss],
    ["Lowest evaluation loss", evaluation(totals)],
    ["Speed", known(totals.median_tokens_per_s) ? `${digits(totals.median_tokens_per_s, 4)} tokens/s, ${amount(totals.median_step_ms / 1e3, "s")} per step (medians)` : ""],
    ["Tokens", totals.tokens > 0 ? totals.tokens.toLocaleString("en") : ""],
    ["Time", totals.steps > 0 ? `${duration(totals.step_seconds)} in steps${known(report.seconds) ? `, ${duration(report.seconds)} in the last process` : ""}` : ""],
    ["Peak memory of a rank", known(totals.peak_bytes) ? amount(totals.peak_bytes, "B") : ""],
    ["Model and ranks", placeOf(runs[0])],
    ["Restarts", restarts.map(one => `after step ${object(one).step}, with ${object(one).ranks} ranks: ${object(one).reason}`).join("; ")],
    ["Slow ranks", totals.straggler_steps > 0 ? `in ${plural(totals.straggler_steps, "step", "steps")}, a rank took more than twice the median time` : ""],
    ["Folder", folder],
  ]));
}

const curvesOf = (runs, key, look = run => run.look) => runs.map(run => ({ name: run.name, look: look(run), steps: list(object(run.curves[key]).steps), values: list(object(run.curves[key]).values) }));

// States that long curves are thinned.
function thinned(runs, key) {
  const most = Math.max(0, ...runs.map(run => object(run.curves[key])).map(({ points, steps }) => (points > list(steps).length ? points : 0)));
  return most > 0 ? paragraph(`Drawn from ${most.toLocaleString("en")} steps: each group of neighbouring steps keeps its smallest and its largest value.`, "note") : "";
}

function over(body, runs, key, options, width) {
  if (drawCurves(body, { ...options, curves: curvesOf(runs, key) }, width)) body.append(thinned(runs, key));
  else body.append(paragraph(`${options.title}: no values yet.`, "quiet"));
}

function loss(body, { runs, isOne }, width) {
  const hasEvaluation = runs.some(run => run.curves.eval_loss);
  if (!isOne || !hasEvaluation) {
    over(body, runs, "loss", { title: "Training loss", name: "loss", mayBeLogarithmic: true }, width);
    if (hasEvaluation) drawCurves(body, { title: "Evaluation loss", name: "evaluation loss", mayBeLogarithmic: true, steps: stepsOf(curvesOf(runs, "loss")), curves: curvesOf(runs, "eval_loss").map(curve => ({ ...curve, isMarked: true })) }, width);
    return;
  }
  const train = { ...curvesOf(runs, "loss")[0], name: "training loss" }, evaluated = { ...curvesOf(runs, "eval_loss", () => "run-1")[0], name: "evaluation loss", isMarked: true };
  drawCurves(body, { title: "Training and evaluation loss", name: "loss", mayBeLogarithmic: true, curves: [train, evaluated] }, width);
  body.append(thinned(runs, "loss"));
}

function gradient(body, { runs }, width) {
  over(body, runs, "grad_norm", { title: "Gradient norm", name: "norm before clipping", mayBeLogarithmic: true }, width);
  for (const { name, totals } of runs) if (totals.skipped_steps > 0) body.append(paragraph(`${name}: ${plural(totals.skipped_steps, "step", "steps")} skipped the update.`));
  if (runs.some(run => run.curves.loss_scale)) over(body, runs, "loss_scale", { title: "Loss scale in fp16", name: "loss scale", mayBeLogarithmic: true }, width);
}

function rate(body, { runs }, width) {
  over(body, runs, "lr", { title: "Learning rate", name: "learning rate", isFromZero: true }, width);
  const tests = runs.filter(run => run.curves.loss_over_lr);
  const curves = curvesOf(tests, "loss_over_lr").map((curve, index) => ({ ...curve, steps: list(tests[index].curves.loss_over_lr.rates) }));
  if (drawCurves(body, { title: "Loss by learning rate", name: "loss", mayBeLogarithmic: true, over: RATES, curves }, width)) body.append(thinned(tests, "loss_over_lr"));
}

function speed(body, { runs }, width) {
  over(body, runs, "tokens_per_s", { title: "Tokens per second", name: "tokens/s", isFromZero: true }, width);
  const seconds = runs.map(run => ({ ...run, curves: { step_s: { ...object(run.curves.step_ms), values: list(object(run.curves.step_ms).values).map(ms => (known(ms) ? ms / 1e3 : null)) } } }));
  over(body, seconds, "step_s", { title: "Step time", name: "time on the slowest rank", unit: "s", isFromZero: true, mayBeLogarithmic: true }, width);
}

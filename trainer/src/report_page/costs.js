// The sections about what a run costs: memory, time and communication. They read `report.json`.

// The rank that held most.
function fullestRank({ report }) {
  const total = rank => (known(rank.measured_peak_total_bytes) ? rank.measured_peak_total_bytes : -1);
  return list(object(report.memory).ranks).map(object).reduce((most, rank) => (most === null || total(rank) > total(most) ? rank : most), null);
}

const withoutReport = run => paragraph(`${run.name} has no report.json yet; the run writes it when it ends.`, "quiet");

function memory(body, { runs, isOne }, width) {
  over(body, runs, "peak_bytes", { title: "Peak memory of the rank with the largest peak", name: "tracked peak so far", unit: "B", isFromZero: true }, width);
  runs.filter(run => !run.hasReport).forEach(run => body.append(withoutReport(run)));
  const fullest = runs.map(run => [run, fullestRank(run)]).filter(([, rank]) => rank);
  if (fullest.length === 0) return;
  const keys = [...new Set(fullest.flatMap(([, rank]) => [...Object.keys(object(rank.measured_peak_bytes)), ...Object.keys(object(rank.planned_peak_bytes))]))];
  const of = (key, label, measured, planned) => fullest.map(([run, rank]) => ({ label: isOne ? label : run.name, value: measured(rank), planned: planned(rank), look: run.color }));
  const groups = keys.map(key => [words(key), of(key, words(key), rank => object(rank.measured_peak_bytes)[key], rank => object(rank.planned_peak_bytes)[key])]);
  groups.push(["all together", of("", "all together", rank => rank.measured_peak_total_bytes, rank => rank.planned_peak_total_bytes)]);
  const used = groups.filter(([, bars]) => bars.some(({ value, planned }) => value > 0 || planned > 0));
  const rows = used.flatMap(([heading, bars]) => (isOne ? bars : [{ heading }, ...bars]));
  body.append(make("h3", null, "Peaks by category, against the plan"), paragraph(`Peaks of ${isOne ? `rank ${fullest[0][1].rank}, which has` : "the rank of each run that has"} the largest peak. The categories reach their peaks at different times.`));
  drawBars(body, { title: "Peak memory by category", name: "peak", unit: "B", rows }, width);
  for (const [run] of fullest) ranks(body, run, isOne);
}

function ranks(body, { name, report }, isOne) {
  const rows = list(object(report.memory).ranks).map(object), bytes = value => (known(value) ? amount(value, "B") : DASH);
  const columns = [["Rank", rank => `rank ${rank.rank}`], ["Tracked peak", rank => bytes(rank.measured_peak_total_bytes)], ["Planned peak", rank => bytes(rank.planned_peak_total_bytes)],
    ["Process peak", rank => bytes(object(rank.resident_bytes).peak_with_shared)], ["GPU peak", rank => bytes(object(rank.gpu_bytes).measured_peak)], ["On disk", rank => (object(rank.disk).bytes > 0 ? bytes(rank.disk.bytes) : DASH)]];
  const shown = columns.filter(([, text]) => rows.some(rank => text(rank) !== DASH));
  if (!isOne) body.append(make("h3", null, name));
  body.append(figures(`Memory of each rank: ${name}`, shown.map(([heading]) => heading), rows.map(rank => shown.map(([, text]) => text(rank)))));
}

function timeline(body, { runs, isOne }, width) {
  const traced = runs.filter(run => run.timeline);
  if (traced.length === 0) return void body.append(paragraph("No trace.json: set wall_clock_breakdown or training.trace to record one.", "quiet"));
  for (const run of traced) {
    const { timeline: shown, overlap, report } = run, figure = make("figure"), text = paragraph("");
    if (!isOne) body.append(make("h3", null, run.name));
    body.append(paragraph(`Step ${shown.step}, which has the median duration of ${plural(shown.steps, "traced step", "traced steps")}.`), figure, text);
    drawTimeline(figure, text, { timeline: { ...shown, title: `Timeline of a step, run ${runs.indexOf(run) + 1}` } }, width);
    if (shown.lanes > shown.rows.length) body.append(paragraph(`The trace has ${plural(shown.lanes, "lane", "lanes")}; this page contains the first ${shown.rows.length}.`, "note"));
    const share = ({ communication, overlapped }) => (communication > 0 ? percent(overlapped / communication) : DASH);
    const rows = overlap.map(one => [`rank ${one.rank}`, amount(one.compute, "s"), amount(one.communication, "s"), amount(one.overlapped, "s"), share(one)]);
    body.append(figures(`Overlap: ${run.name}`, ["All traced steps", "Compute", "Communication and disk", "Overlapped with compute", "Share overlapped"], rows));
    body.append(paragraph("The time of a transfer is counted from its start, or from the end of the previous transfer, until the rank has finished waiting for it.", "note"));
    const gpu = object(report.gpu_timeline);
    if (known(gpu.compute)) body.append(paragraph(`GPU of rank 0 in the traced steps: ${amount(gpu.compute, "s")} of compute, ${amount(gpu.copies, "s")} of copies, ${amount(gpu.transfers, "s")} of transfers; ${amount(gpu.beside_compute, "s")} of the copies and transfers overlapped with compute.`));
  }
}

function traffic(body, { runs, isOne }, width) {
  over(body, runs, "sent_bytes", { title: "Bytes sent per step", name: "payload of all ranks per step", unit: "B", isFromZero: true }, width);
  for (const run of runs) {
    const { report, totals } = run;
    if (!run.hasReport) { body.append(withoutReport(run)); continue; }
    if (!isOne) body.append(make("h3", null, run.name));
    const expected = list(object(report.memory).ranks).map(rank => object(rank).expected_sent_bytes_per_step).filter(known).reduce((sum, bytes) => sum + bytes, 0);
    body.append(paragraph(`Sent in all steps: ${amount(totals.sent_bytes, "B")}. Per step: ${amount(totals.median_sent_bytes, "B")} (median); the layout and the step program predict ${amount(expected, "B")}.`));
    const rows = Object.entries(object(report.collectives)).map(([name, one]) => [words(name), object(one).calls, object(one).sent_bytes, object(one).seconds])
      .sort((a, b) => (b[2] ?? 0) - (a[2] ?? 0)).map(([name, calls, sent, seconds]) => [name, known(calls) ? calls.toLocaleString("en") : DASH, amount(sent, "B"), amount(seconds, "s")]);
    if (rows.length > 0) body.append(figures(`Collectives: ${run.name}`, ["Operation", "Calls of rank 0", "Sent by all ranks", "Time of rank 0"], rows));
  }
}

function time(body, { runs, isOne }, width) {
  runs.filter(run => !run.hasReport).forEach(run => body.append(withoutReport(run)));
  const parts = runs.filter(run => run.hasReport).map(run => {
    const lanes = Object.entries(object(run.report.seconds_by_lane)).filter(([, seconds]) => known(seconds));
    const rest = run.report.seconds - lanes.reduce((sum, [, seconds]) => sum + seconds, 0);
    return [run, new Map(known(rest) && rest > 0 ? [...lanes, ["other", rest]] : lanes)];
  });
  if (parts.length === 0) return;
  const keys = [...new Set(parts.flatMap(([, lanes]) => [...lanes.keys()]))].filter(key => parts.some(([, lanes]) => lanes.get(key) > 0));
  const bar = (run, label, key, lanes) => ({ label, value: lanes.get(key), planned: null, look: run.color });
  const rows = keys.flatMap(key => (isOne ? [bar(parts[0][0], words(key), key, parts[0][1])] : [{ heading: words(key) }, ...parts.map(([run, lanes]) => bar(run, run.name, key, lanes))]));
  body.append(paragraph("Time of rank 0, including evaluations. Communication and disk count only the parts that did not overlap with compute; other is the rest of the process's run time."));
  drawBars(body, { title: "Time of rank 0", name: "time", unit: "s", rows }, width);
}

function configuration(body, { runs, isOne, differences }) {
  if (!isOne) {
    const headings = ["Key", ...runs.map(run => run.name)], value = text => (text === null ? "unknown" : text);
    if (differences.length === 0) body.append(paragraph("No key differs between the runs."));
    else body.append(paragraph("Keys that differ between the runs:"), figures("Keys that differ", headings, differences.map(({ key, values }) => [key, ...values.map(value)])));
  }
  for (const run of runs) {
    if (!run.configuration) body.append(paragraph(`${run.name} has no resolved.yaml.`, "quiet"));
    else body.append(make("details", null, make("summary", null, isOne ? "resolved.yaml" : `resolved.yaml of ${run.name}`), make("pre", null, run.configuration)));
  }
}

// The whole trip with the official Node client: node trip.mjs BASE_URL API_KEY PROJECT_ID
// The upstream behind the service is `batchline mock`, which takes the [[directives]] in the prompts.

import assert from "node:assert/strict";
import { createReadStream, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { setTimeout as wait } from "node:timers/promises";
import OpenAI, { ConflictError, NotFoundError } from "openai";

const [baseURL, key, project] = process.argv.slice(2);
const client = new OpenAI({
  baseURL,
  apiKey: "unused",
  defaultHeaders: { "x-api-key": key, "x-project-id": project },
});

const folder = mkdtempSync(join(tmpdir(), "batchline-node-"));
const endpoint = "/v1/chat/completions";

async function upload(name, prompts) {
  const path = join(folder, name);
  const lines = prompts.map((content, index) =>
    JSON.stringify({
      custom_id: `line-${index}`,
      method: "POST",
      url: endpoint,
      body: { model: "any", messages: [{ role: "user", content }] },
    }),
  );
  writeFileSync(path, lines.join("\n") + "\n");
  return client.files.create({ file: createReadStream(path), purpose: "batch" });
}

async function ended(id) {
  for (;;) {
    const batch = await client.batches.retrieve(id);
    if (["completed", "failed", "expired", "cancelled"].includes(batch.status)) return batch;
    await wait(50);
  }
}

async function linesOf(fileId) {
  const text = await (await client.files.content(fileId)).text();
  assert.ok(text.endsWith("\n"));
  return text.trimEnd().split("\n").map((line) => JSON.parse(line));
}

async function runsABatch() {
  const input = await upload("trip.jsonl", ["Größe? 🙂", "[[status=400]]", "three"]);
  assert.match(input.id, /^file-/);
  assert.equal(input.filename, "trip.jsonl");
  assert.equal(input.status, "processed");

  const created = await client.batches.create({
    input_file_id: input.id,
    endpoint,
    completion_window: "24h",
    metadata: { from: "node" },
  });
  assert.equal(created.status, "in_progress");
  assert.deepEqual(created.request_counts, { total: 3, completed: 0, failed: 0 });

  const batch = await ended(created.id);
  assert.equal(batch.status, "completed");
  assert.deepEqual(batch.request_counts, { total: 3, completed: 2, failed: 1 });
  assert.deepEqual(batch.metadata, { from: "node" });

  const output = await linesOf(batch.output_file_id);
  assert.deepEqual(output.map((line) => line.custom_id).sort(), ["line-0", "line-2"]);
  const first = output.find((line) => line.custom_id === "line-0");
  assert.equal(first.error, null);
  assert.equal(first.response.status_code, 200);
  assert.match(first.response.body.choices[0].message.content, /Größe\? 🙂/);

  const errors = await linesOf(batch.error_file_id);
  assert.deepEqual(errors.map((line) => line.custom_id), ["line-1"]);
  assert.equal(errors[0].response, null);
  assert.equal(errors[0].error.code, "invalid_request_error");

  await assert.rejects(client.batches.cancel(batch.id), ConflictError);
  return batch;
}

async function cancelsABatch() {
  const input = await upload("slow.jsonl", Array(4).fill("[[delay=1]]"));
  const created = await client.batches.create({ input_file_id: input.id, endpoint, completion_window: "24h" });
  const cancelling = await client.batches.cancel(created.id);
  assert.ok(["cancelling", "cancelled"].includes(cancelling.status));
  const batch = await ended(created.id);
  assert.equal(batch.status, "cancelled");
  assert.equal(batch.request_counts.completed + batch.request_counts.failed, 4);
  return batch;
}

async function listsWhatWasMade(newestFirst) {
  const batches = [];
  for await (const batch of client.batches.list({ limit: 1 })) batches.push(batch.id);
  assert.deepEqual(batches, newestFirst.map((batch) => batch.id));

  const purposes = { batch: [], batch_output: [] };
  for (const purpose of Object.keys(purposes)) {
    for await (const file of client.files.list({ purpose, limit: 1 })) purposes[purpose].push(file.id);
  }
  assert.deepEqual(purposes.batch, newestFirst.map((batch) => batch.input_file_id));
  for (const batch of newestFirst) {
    for (const id of [batch.output_file_id, batch.error_file_id]) {
      if (id) assert.ok(purposes.batch_output.includes(id));
    }
  }
}

async function deletes(fileId) {
  assert.deepEqual(await client.files.delete(fileId), { id: fileId, object: "file", deleted: true });
  await assert.rejects(client.files.retrieve(fileId), NotFoundError);
  await assert.rejects(
    client.batches.create({ input_file_id: fileId, endpoint, completion_window: "24h" }),
    (error) => error instanceof NotFoundError && error.message.includes(`Input file not found: ${fileId}`),
  );
}

try {
  const finished = await runsABatch();
  const cancelled = await cancelsABatch();
  await listsWhatWasMade([cancelled, finished]);
  await deletes(finished.input_file_id);
  console.log("the trip is complete");
} finally {
  rmSync(folder, { recursive: true });
}

// Verifies an event from stdin ({"secret", "headers", "body"}) with the official client, and prints its type and batch.
import OpenAI from "openai";

const chunks = [];
for await (const chunk of process.stdin) chunks.push(chunk);
const { secret, headers, body } = JSON.parse(Buffer.concat(chunks).toString());
const client = new OpenAI({ apiKey: "unused", webhookSecret: secret });
const event = await client.webhooks.unwrap(body, headers);
console.log(event.type, event.data.id);

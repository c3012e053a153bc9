-- The trainer published a version; batches may be acked in the same step.
-- Journals: those of the acked batches. ARGV: version, rollback ('1'), batch ids...
-- Reply: ok; lower {version}; updating {update_id}: no rollback beside a weight update, whose labels name the lineage; gone or missing_batch
-- {batch_id}. What always holds: all of it, or nothing.
local job = read_job()
if not job then return reply('missing') end
local version, rollback, now = tonumber(ARGV[1]), ARGV[2] == '1', seconds()
if version < job.version and not rollback then return reply('lower', { version = job.version }) end
local updating = call('HGET', JOB, 'updating')
if rollback and updating and updating ~= '' then return reply('updating', { update_id = updating }) end
for i = 3, #ARGV do
  local refused = ack_refused(ARGV[i])
  if refused then return reply(refused == 'missing' and 'missing_batch' or 'gone', { batch_id = ARGV[i] }) end
end
for i = 3, #ARGV do ack_batch(ARGV[i], job, now) end
unlink_journals(1, #KEYS - JOURNALS)
publish_version(version, rollback, now)
return reply('ok')

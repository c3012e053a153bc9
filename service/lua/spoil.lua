-- A group of a live batch cannot be exported: it fails, and the rest of the batch is handed back.
-- Journals: those of the group's members. ARGV: batch id, group id, reason.
-- Reply: ok; missing. What always holds: a group that is no longer this batch's is left alone.
if not read_job() then return reply('missing') end
local bid, gid, now = ARGV[1], ARGV[2], seconds()
local b, g = load(BATCHES, bid), load(GROUPS, gid)
if not b or not g or g.state ~= 'leased' or g.batch_id ~= bid then return reply('ok') end
end_group(gid, g, 'failed', ARGV[3], now, 'failed:' .. reason_of(ARGV[3]))
unlink_journals(1, #KEYS - JOURNALS)
return_batch(bid, b, 'returned', now)
return reply('ok')

-- The trainer has trained on a batch. Journals: those of its rollouts. ARGV: batch id.
-- Reply: ok; gone: a group was leased again, or its lineage ended; missing.
local job = read_job()
if not job then return reply('missing') end
local refused = ack_refused(ARGV[1])
if refused then return reply(refused) end
ack_batch(ARGV[1], job, seconds())
unlink_journals(1, #KEYS - JOURNALS)
return reply('ok')

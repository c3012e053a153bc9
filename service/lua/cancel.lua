-- The client cancels a group. Journals: those of all members. ARGV: group id.
-- Reply: ok; missing; leased (batch_id): the trainer holds it, so nothing was changed. What always holds: an ended group keeps its end.
if not read_job() then return reply('missing') end
local gid, now = ARGV[1], seconds()
expire_batches(now)
local g = load(GROUPS, gid)
if not g then return reply('missing') end
if g.state == 'leased' then return reply('leased', { batch_id = g.batch_id }) end
if not g.ended_at then
  end_group(gid, g, 'cancelled', nil, now, 'cancelled')
  unlink_journals(1, member_count(g))
end
return reply('ok')

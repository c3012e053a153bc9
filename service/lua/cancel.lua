-- The client cancels a group. KEYS 18..: the journals of all members. ARGV: group id.
-- Reply: ok; missing. What always holds: a group that has ended keeps its end.
if not read_job() then return reply('missing') end
local gid, now = ARGV[1], seconds()
local g = load(GROUPS, gid)
if not g then return reply('missing') end
if not g.ended_at then
  end_group(gid, g, 'cancelled', nil, now)
  unlink_journals(1, g.size)
end
return reply('ok')
